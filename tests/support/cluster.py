"""Rank processes for tests: started once per size, then handed one function after another.

Starting a rank costs seconds (importing torch), running a test on it milliseconds, so a `Cluster`
of np ranks with `hvd.init()` done is kept for the whole pytest session. The test process sends the
address of a top-level function (file, module, qualified name) and its arguments; each rank imports
the test file, calls the function and sends back the result or the exception:

    def sums(offset):                                # runs on every rank
        return hvd.allreduce(torch.tensor(hvd.rank() + offset), op=hvd.Sum).item()

    def test_sum(cluster):                           # runs here, once per size
        assert cluster.run(sums, 10) == [sum(range(10, 10 + cluster.size))] * cluster.size

A rank that does not answer in time has its stacks dumped; the ranks are then killed and the next
test gets fresh ones. Jobs that are meant to die go through `support.scripts` instead.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from support.processes import REPOSITORY, TAG, kill_tagged, new_tag, rank_environment, tagged

TESTS = REPOSITORY / "tests"
START_SECONDS = 100.0  # importing torch in all ranks at once, on a busy machine
RUN_SECONDS = 60.0
GRACE_SECONDS = 10.0  # for the other ranks, once one has failed
LEAVE_SECONDS = 30.0


class RankFailure(AssertionError):
    """A function failed on at least one rank. `errors` maps rank to the exception raised there."""

    def __init__(self, text: str, errors: dict[int, BaseException]) -> None:
        super().__init__(text)
        self.errors = errors


class ClusterDied(AssertionError):
    """A rank ended or did not answer in time; the text has the ranks' output and stacks."""


class Cluster:
    """`size` rank processes that are up, initialised and waiting for a function.

    `settings` are variables added to their environment; `{parity}` in a value is 0 on even ranks
    and 1 on odd ones.
    """

    def __init__(self, size: int, settings: Mapping[str, str] | None = None) -> None:
        from torch.distributed import TCPStore  # here, so that tests/core runs without torch

        self.size = size
        self._settings = dict(settings or {})
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.tag = new_tag()
        self._logs = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115
        self._pipes: list[Connection] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        self.alive = True
        try:
            for rank in range(size):
                self._start(rank)
            self._answers(START_SECONDS, "starting the ranks")
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        environment = rank_environment(rank, self.size, self._store.port)
        for name, value in self._settings.items():
            environment[name] = value.replace("{parity}", str(rank % 2))
        environment[TAG] = self.tag
        self._pipes.append(ours)
        self._ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "support.rank_main", str(theirs.fileno())],
                cwd=TESTS,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._logs[rank],
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        )
        theirs.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = RUN_SECONDS
    ) -> list[Any]:
        """Call `function(*args)` on every rank; the results by rank.

        Raises RankFailure if it raised anywhere, ClusterDied if a rank ended or took longer than
        `timeout` seconds. A function that leaves operations in flight on some ranks only counts as
        failed.
        """
        file = sys.modules[function.__module__].__file__
        self._send(pickle.dumps((file, function.__module__, function.__qualname__, args)))
        answers = self._answers(timeout, f"{function.__qualname__} at np={self.size}")
        self._send(b"")  # a barrier: is everyone still in step?
        self._answers(GRACE_SECONDS, f"the barrier after {function.__qualname__} at np={self.size}")
        return [answers[rank] for rank in range(self.size)]

    def _send(self, message: bytes) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                self._give_up(f"rank {rank} had already ended")

    def _answers(self, timeout: float, doing: str) -> dict[int, Any]:
        """One answer per rank; once one rank has failed the others get a short grace only."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        errors: dict[int, BaseException] = {}
        deadline = time.monotonic() + timeout
        pending = dict(zip(self._pipes, range(self.size), strict=True))
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    ok, value, error, text = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._give_up(f"{doing}: rank {rank} ended", failures)
                if ok:
                    results[rank] = value
                    continue
                failures[rank] = text
                if error is not None:
                    errors[rank] = error
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not ready:
                missing = sorted(pending.values())
                self._give_up(f"{doing}: no answer from ranks {missing}", failures, stacks=True)
        if failures:
            texts = [f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())]
            self.kill()  # whatever the failure left in flight must not reach the next test
            failure = RankFailure(f"{doing} failed\n" + "\n".join(texts), errors)
            raise failure from next(iter(errors.values()), None)
        return results

    def _give_up(
        self, why: str, failures: dict[int, str] | None = None, stacks: bool = False
    ) -> None:
        """Kill the ranks and raise with everything they left behind."""
        if stacks:
            for process in self._ranks:
                if process.poll() is None:
                    process.send_signal(signal.SIGUSR1)  # faulthandler: stacks into the log
            time.sleep(1.0)
        else:
            time.sleep(0.2)  # a dying rank may still be printing its traceback
        states = [process.poll() for process in self._ranks]
        texts = [f"{why}\nexit statuses by rank (None: running): {states}"]
        texts += [
            f"--- rank {rank} raised ---\n{text}" for rank, text in sorted((failures or {}).items())
        ]
        texts += [f"--- rank {rank} printed ---\n{self.output(rank)}" for rank in range(self.size)]
        self.kill()
        raise ClusterDied("\n".join(texts))

    def output(self, rank: int, limit: int = 12_000) -> str:
        """The last `limit` bytes that the rank wrote to stdout and stderr."""
        log = self._logs[rank]
        log.flush()
        end = os.fstat(log.fileno()).st_size
        return os.pread(log.fileno(), limit, max(0, end - limit)).decode(errors="replace")

    def kill(self) -> None:
        """End the ranks and whatever they started, at once."""
        if not self.alive:
            return
        self.alive = False
        kill_tagged(self.tag)
        for process in self._ranks:
            process.wait()
        for closeable in (*self._pipes, *self._logs):
            closeable.close()
        del self._store

    def dismiss(self) -> None:
        """Tell the ranks to shut down."""
        for pipe in self._pipes:
            pipe.close()  # they see the end of the file

    def close(self) -> None:
        """Let the ranks shut down; AssertionError if one fails to, or leaves a process behind."""
        if not self.alive:
            return
        self.dismiss()
        statuses: list[int | None] = []
        deadline = time.monotonic() + LEAVE_SECONDS
        for process in self._ranks:
            try:
                statuses.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                statuses.append(None)
        left = tagged(self.tag)
        outputs = [f"--- rank {rank} printed ---\n{self.output(rank)}" for rank in range(self.size)]
        self.kill()
        if left or any(statuses):
            raise AssertionError(
                f"np={self.size}: exit statuses {statuses} (None: did not end), left behind: "
                f"processes {left}\n" + "\n".join(outputs)
            )


class Clusters:
    """The clusters of one pytest session by size and settings, started when first asked for."""

    def __init__(self) -> None:
        self._clusters: dict[object, Cluster] = {}

    def get(self, size: int, settings: Mapping[str, str] | None = None) -> Cluster:
        key = (size, frozenset((settings or {}).items()))
        cluster = self._clusters.get(key)
        if cluster is None or not cluster.alive:
            cluster = self._clusters[key] = Cluster(size, settings)
        return cluster

    def close(self) -> None:
        errors = []
        for cluster in self._clusters.values():
            cluster.dismiss()  # all at once: leaving takes a second or two each
        for cluster in self._clusters.values():
            try:
                cluster.close()
            except AssertionError:
                errors.append(traceback.format_exc())
        if errors:
            raise AssertionError("\n".join(errors))


@contextmanager
def clusters() -> Iterator[Clusters]:
    """All clusters of a session; on leaving, none of their processes is left."""
    session = Clusters()
    try:
        yield session
    finally:
        session.close()


def module_directory(file: str) -> str:
    """What must be on sys.path for the test file to be importable by its module name."""
    return str(Path(file).resolve().parent)
