"""Runs hvdrun, and proves that nothing is left of a job after its end."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from support.processes import TAG, clean_environment, new_tag, wait_untagged

PYTHON = sys.executable
HVDRUN = (PYTHON, "-m", "hvdtorch.launch")
LEAVE_SECONDS = 10.0  # for the end of what was killed, on a busy machine


class Hvdrun:
    """Starts hvdrun with arguments; every process of it and below it carries this test's mark."""

    def __init__(self) -> None:
        self.tag = new_tag()
        self.started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        *args: str,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = HVDRUN,
    ) -> subprocess.Popen[bytes]:
        """hvdrun in the background, with pipes for its output. `program` runs it in other ways."""
        process = subprocess.Popen(
            [*program, *args],
            env=clean_environment() | dict(env or {}) | {TAG: self.tag},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self.started.append(process)
        return process

    def __call__(
        self,
        *args: str,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = HVDRUN,
    ) -> subprocess.CompletedProcess[str]:
        """hvdrun to its end, with what it wrote."""
        process = self.start(*args, env=env, program=program)
        out, err = process.communicate()
        return subprocess.CompletedProcess(args, process.returncode, out.decode(), err.decode())

    def python(
        self,
        np: int,
        source: str,
        *args: str,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """`hvdrun -np <np> <flags> python -c <source> <args>` to its end; it leaves nothing."""
        result = self(*self.command(np, source, *args, flags=flags), env=env)
        assert self.left(0.0) == []
        return result

    @staticmethod
    def command(np: int, source: str, *args: str, flags: Sequence[str] = ()) -> list[str]:
        return ["-np", str(np), *flags, PYTHON, "-c", source, *args]

    def left(self, seconds: float = LEAVE_SECONDS) -> list[int]:
        """Processes of this test that still live after at most so long."""
        return wait_untagged(self.tag, seconds)


def lines_of(text: str) -> list[str]:
    """The lines of a console, in an order that does not depend on the ranks' pace."""
    return sorted(text.splitlines())


def read_until(process: subprocess.Popen[bytes], count: int) -> list[str]:
    """The next `count` lines on hvdrun's stdout, read as they come."""
    assert process.stdout is not None
    data = b""
    while data.count(b"\n") < count:
        more = os.read(process.stdout.fileno(), 4096)
        assert more, f"hvdrun ended early, after {data!r}"
        data += more
    return lines_of(data.decode())
