"""Starting, finding and describing processes on Linux, so that none outlives the job.

Three things hold a rank's processes together: the rank leads a session of its own; it is killed
when hvdrun dies; and whatever it started that loses its parent becomes a child of hvdrun, wherever
it went (a "subreaper" is who adopts orphans), so that all of it can be found below hvdrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def open_standard_files() -> None:
    """Open what this process was started without of stdin, stdout and stderr, on /dev/null.

    Otherwise the next file that it opens would be taken for one of them, here and by children.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: fd


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant that loses its own."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def start_rank(
    command: Sequence[str], environ: Mapping[str, str], keep_fds: Collection[int]
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a new session, with pipes for its stdout and stderr.

    It inherits `keep_fds`, and no other open file.

    Raises:
        OSError: if it cannot be run.
    """
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        pass_fds=keep_fds,
        preexec_fn=_die_with(os.getpid()),
    )


def _die_with(parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return in_child


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when `pid` exits; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def descendants(root: int, without: Collection[int] = ()) -> list[int]:
    """All living processes below `root`, except those in `without` and what is below those."""
    children = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                # "pid (any name) state ppid ...": the name may hold anything, even parentheses.
                stat = Path(entry.path, "stat").read_bytes()
                state, parent = stat.rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):  # it is gone
                continue
            if state != b"Z":  # a dead process has no children, they went to who adopts orphans
                children[int(parent)].append(int(entry.name))
    found: list[int] = []
    level = [root]
    while level:
        level = [pid for up in level for pid in children[up] if pid not in without]
        found += level
    return found


def dead_child() -> int | None:
    """A child of this process that has exited and was not collected yet."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if info is None else info.si_pid


def collect(pid: int) -> None:
    """Let the system forget a dead child."""
    os.waitpid(pid, 0)


def send(pid: int, signum: int) -> None:
    """Send a signal to a process, if it still exists and is ours to signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def send_group(leader: int, signum: int) -> None:
    """Send a signal to a process group, if any of it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)


def exit_status(returncode: int) -> int:
    """What a shell reports: the status, or 128 + the number of the signal that killed it."""
    return returncode if returncode >= 0 else 128 - returncode


def describe_exit(returncode: int) -> str:
    """`exited with status 3`, `was killed by signal 9 (SIGKILL)`."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        name = f" ({signal.Signals(-returncode).name})"
    except ValueError:  # a real-time signal
        name = ""
    return f"was killed by signal {-returncode}{name}"
