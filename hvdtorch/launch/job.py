"""One job on this host: its ranks, from the first start to the last process's end.

A job ends in one of three ways. All ranks exit with 0. Or one fails: it is the cause, and gives the
job its status; the others fail within moments because of it, so they get SETTLE_TIME to report
what they saw before they are asked to end (SIGTERM). Or hvdrun gets a signal and passes it on.

The first rank to exit need not be the cause: a rank tells the others that it leaves before it has
exited itself, and they may be faster. So a rank that ends because of another's failure (an echo)
writes its number to a pipe, HVDTORCH_ECHO_FD, and is the cause only if nobody else is: after an
echo the others have the grace time to show who is, before they are asked to end.

Signals go to the ranks' main processes only: the processes of a DataLoader must survive a SIGTERM
for a rank to be able to finish its step and save.

The loop waits for events only: output, exits, signals. There is no polling.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from hvdtorch.launch import output, processes
from hvdtorch.launch.companion import Companion

SETTLE_TIME = 1.0  # s, from the first failure to SIGTERM for the others
_KILL_TIME = 5.0  # s, how long hvdrun waits for what it has killed: it may hang in the kernel

# While this much output is not taken, nothing more is read from the ranks.
_MOST_BACKLOG = 1 << 20


@dataclass
class Rank:
    """One rank's main process."""

    number: int
    process: subprocess.Popen[bytes]
    streams: list[output.Stream]
    pidfd: int | None = None  # readable once it has exited
    echo: bool = False  # it fails because another rank failed


@dataclass(frozen=True)
class Options:
    """How a job is run."""

    grace_time: float = 5.0  # s, from asking a rank to end to killing it
    timestamps: bool = False  # before each line of output
    verbose: bool = False


@dataclass
class _Schedule:
    """What happens next if nothing else does: a moment, and what to do then."""

    steps: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def set(self, *steps: tuple[float, Callable[[], None]]) -> None:
        """Replace the plan by `steps`: (seconds from now, what to do)."""
        now = time.monotonic()
        self.steps = [(now + seconds, action) for seconds, action in steps]

    def time_left(self) -> float | None:
        return max(0.0, self.steps[0][0] - time.monotonic()) if self.steps else None

    def run_due(self) -> None:
        while self.steps and self.steps[0][0] <= time.monotonic():
            self.steps.pop(0)[1]()


class Job:
    """Runs `command` once for each environment, and forwards the output to `console`."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        listener: socket.socket,
        console: output.Console,
        files: Sequence[Sequence[output.Sink]],
        options: Options,
    ) -> None:
        """Prepare a job.

        Args:
            command: program and arguments, run as they are.
            environments: each rank's whole environment, in rank order.
            listener: the bound socket on which the rendezvous store is to be served.
            console: where the output goes.
            files: for each rank, where its stdout and its stderr go as well; empty: nowhere.
            options: how it is run.
        """
        self._command = command
        self._environments = environments
        self._listener = listener
        self._console = console
        self._files = files
        self._options = options
        self._selector = selectors.DefaultSelector()
        self._ranks: list[Rank] = []
        self._running: list[Rank] = []
        self._reading: set[output.Stream] = set()  # streams that have not ended
        self._paused = False  # they are not read from, because the console takes nothing
        self._schedule = _Schedule()
        self._stopping = False
        self._settling = False  # a rank has failed, and none has been asked to end
        self._interrupted = False  # by a signal after the last rank's end
        self._status = 0
        self._why = ""  # the job's last line, "" for a job that went well
        self._cause: Rank | None = None  # the rank that failed
        self._wakeups, self._wakeup_in = socket.socketpair()
        self._echoes, self._echoes_in = os.pipe()

    def run(self) -> int:
        """Run the job to its end, and return hvdrun's exit status."""
        self._catch_signals()
        processes.adopt_orphans()
        # What a shell that turned into hvdrun had started before is none of the job's.
        self._not_ours = set(processes.descendants(os.getpid()))
        companion = Companion(self._listener)
        self._not_ours.add(companion.pid)
        self._companion = companion.pid
        try:
            self._start(companion)
            while self._running:
                self._turn()
        finally:
            self._kill_leftovers()
            companion.stop()
        for rank in self._ranks:
            for stream in rank.streams:
                stream.finish()
        if self._why:
            self._console.say(self._why)
        while any(sink.backlog for sink in self._console.sinks) and not self._interrupted:
            self._turn()
        return self._status

    # Starting

    def _catch_signals(self) -> None:
        def wake_up(signum: int, frame: FrameType | None) -> None:
            """The number goes through the socket; a handler must exist for that to happen."""

        for end in (self._wakeups, self._wakeup_in):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_in.fileno(), warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(signum, wake_up)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, wake_up)
        self._selector.register(self._wakeups, selectors.EVENT_READ, self._on_wakeup)

    def _start(self, companion: Companion) -> None:
        os.set_blocking(self._echoes, False)
        echo = {"HVDTORCH_ECHO_FD": str(self._echoes_in)}
        for number, environ in enumerate(self._environments):
            try:
                process = processes.start_rank(
                    self._command, {**environ, **echo}, keep_fds=[self._echoes_in]
                )
            except OSError as error:
                self._status = 127 if isinstance(error, FileNotFoundError) else 126
                self._why = f"cannot run {self._command[0]!r}: {error.strerror}"
                self._kill()
                return
            companion.watch(process.pid)
            rank = Rank(number, process, self._streams(number, process))
            self._ranks.append(rank)
            self._running.append(rank)
            self._reading.update(rank.streams)
            for stream in rank.streams:
                self._listen(stream)
            rank.pidfd = processes.open_pidfd(process.pid)
            if rank.pidfd is not None:
                check = functools.partial(self._check, rank)
                self._selector.register(rank.pidfd, selectors.EVENT_READ, check)
            self._tell(f"rank {number} is process {process.pid}")

    def _streams(self, number: int, process: subprocess.Popen[bytes]) -> list[output.Stream]:
        sinks: list[list[output.Sink]] = [[self._console.stdout], [self._console.stderr]]
        if self._files:
            for stream_sinks, file in zip(sinks, self._files[number], strict=True):
                stream_sinks.append(file)
        return [
            output.Stream(pipe, number, name, stream_sinks, self._options.timestamps)
            for pipe, name, stream_sinks in zip(
                (process.stdout, process.stderr), ("stdout", "stderr"), sinks, strict=True
            )
            if pipe is not None
        ]

    # Events

    def _turn(self) -> None:
        """Wait for events, or for the next step of the schedule, and act on them."""
        self._wait_for_console()
        # epoll reports in the order in which things happened: of several exits the first is first.
        for key, _ in self._selector.select(self._schedule.time_left()):
            key.data()
        self._reap()
        self._schedule.run_due()

    def _listen(self, stream: output.Stream) -> None:
        def on_data() -> None:
            if not stream.read():
                self._selector.unregister(stream.fd)
                self._reading.discard(stream)

        self._selector.register(stream.fd, selectors.EVENT_READ, on_data)

    def _wait_for_console(self) -> None:
        """Have the loop woken when a sink with a backlog takes more; pause the ranks meanwhile."""
        for sink in self._console.sinks:
            registered = sink.fd in self._selector.get_map()
            if bool(sink.backlog) != registered:
                if registered:
                    self._selector.unregister(sink.fd)
                else:
                    self._selector.register(sink.fd, selectors.EVENT_WRITE, sink.flush)
        pause = any(sink.backlog > _MOST_BACKLOG for sink in self._console.sinks)
        if pause != self._paused:
            self._paused = pause
            for stream in list(self._reading):
                if pause:
                    self._selector.unregister(stream.fd)
                else:
                    self._listen(stream)

    def _on_wakeup(self) -> None:
        for signum in self._wakeups.recv(4096):
            if signum != signal.SIGCHLD:  # which only ends the wait: _turn() looks for exits
                self._on_signal(signum)

    def _reap(self) -> None:
        """Collect dead children: adopted orphans, and ranks where the system has no pidfd."""
        ranks = {rank.process.pid: rank for rank in self._running}
        while (pid := processes.dead_child()) is not None:
            if pid not in ranks:
                processes.collect(pid)
                if pid == self._companion:
                    self._console.say(
                        "the process that serves the rendezvous store has died: "
                        "ranks that have not met yet will not"
                    )
            elif ranks[pid].pidfd is None:
                self._check(ranks[pid])
            else:  # its pidfd tells in a moment, in its order among others
                break

    def _check(self, rank: Rank) -> None:
        """The rank's process may have exited."""
        returncode = rank.process.poll()
        if returncode is None:
            return
        self._running.remove(rank)
        if rank.pidfd is not None:
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)
        said = f"rank {rank.number} (process {rank.process.pid}) "
        said += processes.describe_exit(returncode)
        self._tell(said)
        if returncode == 0:
            return
        self._note_echoes()
        if not self._stopping:
            self._stopping = True
            self._settling = True
        if self._settling and (self._cause is None or (self._cause.echo and not rank.echo)):
            self._cause = rank
            self._status = processes.exit_status(returncode)
            self._why = f"{said}; the job has been ended"
            grace_time = self._options.grace_time
            settle_time = SETTLE_TIME + (grace_time if rank.echo else 0)
            self._schedule.set(
                (settle_time, lambda: self._ask(signal.SIGTERM)),
                (settle_time + grace_time, self._kill),
            )

    def _note_echoes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._echoes, 1 << 16).split():
                if number.isdigit() and int(number) < len(self._ranks):
                    self._ranks[int(number)].echo = True

    def _on_signal(self, signum: int) -> None:
        if not self._running:
            self._interrupted = True
            return
        if self._stopping:
            self._tell(f"{signal.Signals(signum).name} again: killing the ranks")
            self._kill()
            return
        self._stopping = True
        self._status = 128 + signum
        self._why = f"ended by {signal.Signals(signum).name}"
        self._ask(signum)
        self._schedule.set((self._options.grace_time, self._kill))

    # Ending

    def _ask(self, signum: int) -> None:
        self._settling = False
        self._tell(f"sending {signal.Signals(signum).name} to {len(self._running)} ranks")
        for rank in self._running:
            processes.send(rank.process.pid, signum)

    def _kill(self) -> None:
        self._stopping = True
        self._settling = False
        for rank in self._running:
            processes.send_group(rank.process.pid, signal.SIGKILL)
        self._schedule.set((_KILL_TIME, self._give_up))

    def _give_up(self) -> None:
        names = ", ".join(f"{rank.number} ({rank.process.pid})" for rank in self._running)
        self._console.say(f"ranks {names} cannot be killed, leaving them")
        self._running.clear()

    def _kill_leftovers(self) -> None:
        """Kill whatever the ranks had started, wherever it went, and wait until it is gone."""
        deadline = time.monotonic() + _KILL_TIME
        while left := processes.descendants(os.getpid(), self._not_ours):
            if time.monotonic() >= deadline:
                self._console.say(f"processes {left} cannot be killed, leaving them")
                break
            for pid in left:
                processes.send(pid, signal.SIGKILL)
            self._schedule.set((deadline - time.monotonic(), lambda: None))
            self._turn()
        self._schedule.set()

    def _tell(self, text: str) -> None:
        if self._options.verbose:
            self._console.say(text)
