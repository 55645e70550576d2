"""A second process beside hvdrun. It serves the rendezvous store, and it outlives hvdrun's death.

It serves torch's TCPStore on a socket that hvdrun opened before it started the ranks, so importing
torch (seconds) delays neither them nor hvdrun. And when hvdrun is killed so hard that it cannot end
the job itself, the ranks die with it, but not what they had started: the companion kills that.

Its standard input is a pipe from hvdrun: a line for each rank's process group. The end of the pipe
is the end of hvdrun; after an orderly end of the job the companion is killed before it sees one.
It is run as a file, not as a module: it needs torch, and nothing of hvdtorch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading


class Companion:
    """hvdrun's side of it."""

    def __init__(self, listener: socket.socket) -> None:
        """Start the process, and give it the listening socket."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        listener.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, group: int) -> None:
        """Have a rank's process group killed if hvdrun dies."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead; the ranks will find no store
            self._process.stdin.write(b"%d\n" % group)

    def stop(self) -> None:
        """End the process: the job is over."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def _main() -> None:
    # Run as a file, its folder comes first in the path, and would hide others' modules.
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    # hvdrun alone decides when this process ends.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    guard = threading.Thread(target=_kill_ranks_when_launcher_dies)
    guard.start()
    store = _serve(int(sys.argv[1]))
    guard.join()
    del store


def _kill_ranks_when_launcher_dies() -> None:
    groups = [int(line) for line in sys.stdin]
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    os._exit(0)


def _serve(fd: int) -> object:
    try:
        from torch.distributed import TCPStore

        with socket.socket(fileno=os.dup(fd)) as listener:
            port = listener.getsockname()[1]
        return TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd
        )
    except Exception as error:
        os.close(fd)  # ranks that look for a store find none at once, instead of waiting
        print(f"hvdrun: no rendezvous store for the ranks: {error}", file=sys.stderr, flush=True)
        return None


if __name__ == "__main__":
    _main()
