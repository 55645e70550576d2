"""The rank's side of a companion: start it, ask it, keep it stopped while others are measured.

A companion is a process of another interpreter beside each rank of the benchmark. All ranks make
the same calls in the same order. Between calls a companion is stopped (SIGSTOP): Horovod wakes its
background thread every millisecond, which must not disturb the other peers.

Nothing stays behind. The connection is an abstract socket, which is no file; a companion asks the
kernel to kill it when its parent dies; and mpirun, where it is the parent, ends with rank 0.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from bench_tools.ranks import environment_without_launcher, from_rank_0

MAIN = Path(__file__).with_name("main.py")
START_SECONDS = 120  # imports of torch on busy cores
LEAVE_SECONDS = 20
ADDRESS = "HVDBENCH_ADDRESS"  # what a companion finds in its environment
KIND = "HVDBENCH_KIND"
KINDS = ("gloo", "mpi")  # what Horovod's ranks talk over


class CompanionError(RuntimeError):
    """A companion failed; the text has what it said."""


class Companion:
    """The companion of this rank, with the object it serves."""

    def __init__(self, python: Path, kind: str, served: str) -> None:
        """Start the companions of all ranks and connect them to each other.

        Args:
            python: their interpreter.
            kind: one of KINDS.
            served: "module:Class" below benchmarks/, made without arguments in the companion.
        """
        self._what = f"the companion of rank {dist.get_rank()} ({kind}, {python})"
        self._child: subprocess.Popen[bytes] | None = None
        name = from_rank_0(f"hvdbench-{secrets.token_hex(8)}")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}-{dist.get_rank()}")
            listener.listen(1)
            dist.barrier()  # all listen
            environment = environment_without_launcher() | {ADDRESS: name, KIND: kind}
            environment["PYTHONPATH"] = str(MAIN.parents[1])  # and none of this interpreter's
            if command := _command(python, kind):
                self._child = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=2
                )
            self._connection, self._pid = self._accept(listener)
        # Rank 0's companion opens what the others meet at.
        meeting = self._ask("open_meeting") if dist.get_rank() == 0 else None
        self._version = self._ask("meet", from_rank_0(meeting), served)
        dist.barrier()
        self._stop()

    def version(self) -> str:
        """Of the library, for the head of the report."""
        return self._version

    def call(self, method: str, *arguments: Any) -> Any:
        """What `method` of the served object returns, there. All ranks call together."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)
        answer = self._ask("call", method, arguments)
        dist.barrier()  # the others' may still need this one's background thread
        self._stop()
        return answer

    def close(self) -> None:
        """Let the companions leave their job; what does not do so in time is killed."""
        with suppress(OSError, CompanionError):
            os.kill(self._pid, signal.SIGCONT)
            self._connection.send(("leave",))
            if not self._connection.poll(LEAVE_SECONDS):  # the others' were not asked, perhaps
                os.kill(self._pid, signal.SIGKILL)
        self._connection.close()
        if self._child is not None:
            try:
                self._child.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()

    def _stop(self) -> None:
        """Returns when it has happened, since a process on its way to a stop still takes a core."""
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended: the next call will say so
            os.kill(self._pid, signal.SIGSTOP)
            status = Path(f"/proc/{self._pid}/stat")
            # The state follows the name, which is in brackets and may hold anything.
            while status.read_text().rpartition(")")[2].split()[0] not in "TZX":
                time.sleep(0.0001)

    def _accept(self, listener: socket.socket) -> tuple[Connection, int]:
        """The connection of this rank's companion, and its process id."""
        for _ in range(START_SECONDS):
            listener.settimeout(1.0)
            with suppress(TimeoutError):
                connected, _ = listener.accept()
                credentials = connected.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
                )
                pid, user, _ = struct.unpack("3i", credentials)
                if user != os.getuid():
                    raise CompanionError(f"{self._what}: user {user} connected in its place")
                connected.setblocking(True)
                return Connection(connected.detach()), pid
            if self._child is not None and self._child.poll() is not None:
                raise CompanionError(
                    f"{self._what} ended with status {self._child.returncode} before it connected; "
                    "its own words are above"
                )
        raise CompanionError(f"{self._what} did not connect within {START_SECONDS} s")

    def _ask(self, *request: Any) -> Any:
        try:
            self._connection.send(request)
            succeeded, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise CompanionError(f"{self._what} ended while it was asked to {request}") from error
        if not succeeded:
            raise CompanionError(f"{self._what} failed to {request[0]}:\n{answer}")
        return answer


def _command(python: Path, kind: str) -> list[str] | None:
    """What this rank has to start: its companion, or on rank 0 the mpirun of all of them."""
    # Not resolved: the link's place is what makes it the interpreter of an environment.
    interpreter = str(python.absolute())
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind == "gloo":
        return [interpreter, str(MAIN), str(os.getpid()), str(rank), str(size)]
    if rank != 0:
        return None
    beside = python.absolute().with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise CompanionError("there is no mpirun beside --horovod-python, nor on PATH")
    # As horovodrun does it: no binding to cores.
    command = [mpirun, "-np", str(size), "--oversubscribe", "--bind-to", "none"]
    command += ["--map-by", "slot", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    command += [interpreter, str(MAIN), "0"]
    return [interpreter, str(MAIN), "--mpirun", str(os.getpid()), *command]
