"""A companion: connects to its rank, becomes a rank of a Horovod job, does what it is asked.

    python main.py PARENT [RANK SIZE]             a companion (without RANK: mpirun says which)
    python main.py --mpirun PARENT MPIRUN ...     that command, which ends with PARENT

Started by beside.py only. PARENT is a process id, 0 for whoever it is.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from bench_tools.lifetime import end_with


class Service:
    """What a rank may ask for; each method is one kind of request."""

    def __init__(self, rank: int, size: int, kind: str) -> None:
        # Set before torch is imported. Ranks share the cores.
        os.environ["OMP_NUM_THREADS"] = "1"
        from companions.job import Job

        self._job = Job(rank, size, kind)
        self._served: Any = None

    def open_meeting(self) -> Any:
        """On rank 0: where the companions will meet."""
        return self._job.open_meeting()

    def meet(self, meeting: Any, served: str) -> str:
        """Join the others, make the object that is served; its version."""
        self._job.meet(meeting)
        module, _, name = served.partition(":")
        self._served = getattr(importlib.import_module(module), name)()
        return str(self._served.version())

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """A method of the served object."""
        return getattr(self._served, method)(*arguments)

    def leave(self) -> None:
        """Part from the others."""
        self._job.leave()


def serve(connection: Connection, service: Service) -> None:
    """Answer until told to leave."""
    while True:
        request, *arguments = connection.recv()
        try:
            answer = (True, getattr(service, request)(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        connection.send(answer)
        if request == "leave":
            return


def leave_once(*_: object) -> None:
    """On SIGTERM: leave, through every `finally`, even if it is sent again."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def run_mpirun(command: list[str]) -> int:
    """Its exit status. Open MPI leaves its files in /dev/shm when its ranks are killed, so they get
    a folder that goes with this process."""
    with tempfile.TemporaryDirectory(prefix="hvdbench-", dir="/dev/shm") as directory:
        place = ["--mca", "btl_vader_backing_directory", directory]
        child = subprocess.Popen(
            [command[0], *place, *command[1:]], preexec_fn=partial(end_with, 0, signal.SIGTERM)
        )
        try:
            return child.wait()
        finally:
            child.terminate()
            child.wait()


def main(arguments: list[str]) -> None:
    """See the module's text."""
    if arguments[0] == "--mpirun":
        signal.signal(signal.SIGTERM, leave_once)
        end_with(int(arguments[1]), signal.SIGTERM)
        sys.exit(run_mpirun(arguments[2:]))
    end_with(int(arguments[0]))
    if arguments[1:]:
        rank, size = int(arguments[1]), int(arguments[2])
    else:
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(f"\0{os.environ['HVDBENCH_ADDRESS']}-{rank}")
    connection = Connection(connected.detach())
    try:
        serve(connection, Service(rank, size, os.environ["HVDBENCH_KIND"]))
    except EOFError:  # the rank is gone; the others' companions may not answer any more
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
