"""Lines from many ranks to one console: whole, labelled with their rank, and without delay.

A `Stream` is what one rank writes to stdout or stderr. It cuts the bytes it is given into lines; a
line ends with a newline or, for progress bars, a carriage return. A `Sink` is where lines go: it
never blocks, so hvdrun stays able to react to signals while nobody reads its output.
"""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path
from typing import IO

# A rank that never ends its line has it forwarded in pieces of this size.
LONGEST_LINE = 1 << 20

# A blocking pipe that poll() calls writable takes this much at least without blocking; a terminal
# takes 256 bytes (Linux: drivers/tty/n_tty.c, WAKEUP_CHARS).
_PIPE_CHUNK = select.PIPE_BUF
_TERMINAL_CHUNK = 256

_READ = 1 << 16


class Sink:
    """An open file that is written to as fast as it takes data, and never faster."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False  # the reader is gone: what is written is dropped
        self._pending = bytearray()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        mode = os.fstat(fd).st_mode
        self._regular = stat.S_ISREG(mode)
        self._chunk = _TERMINAL_CHUNK if stat.S_ISCHR(mode) else _PIPE_CHUNK

    @property
    def backlog(self) -> int:
        """Bytes written but not yet taken."""
        return len(self._pending)

    def write(self, data: bytes) -> None:
        """Append `data`, and pass on what the file takes at once."""
        if not self.closed:
            self._pending += data
            self.flush()

    def flush(self) -> None:
        """Pass on as much as the file takes without blocking."""
        taken = 0
        try:
            while taken < len(self._pending) and (self._regular or self._poll.poll(0)):
                end = len(self._pending) if self._regular else taken + self._chunk
                taken += os.write(self.fd, self._pending[taken:end])
        except BlockingIOError:  # someone else made the file non-blocking
            pass
        except OSError:  # closed by its reader, disk full, terminal gone: the job goes on
            self.closed = True
            taken = len(self._pending)
        del self._pending[:taken]


class Console:
    """hvdrun's stdout and stderr: one sink if both are the same file, so that lines stay whole."""

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        self.stdout = Sink(stdout)
        same = os.path.sameopenfile(stdout, stderr)
        self.stderr = self.stdout if same else Sink(stderr)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return (self.stdout,) if self.stdout is self.stderr else (self.stdout, self.stderr)

    def say(self, text: str) -> None:
        """A line of hvdrun's own."""
        self.stderr.write(f"hvdrun: {text}\n".encode(errors="surrogateescape"))


class Stream:
    """What one rank writes to `name` (stdout or stderr), from its pipe to the sinks.

    A line becomes `[<rank>]<name>:line`; with `timestamps` the local time stands before it, as in
    `Mon Nov 30 13:38:34 2026[1]<stdout>:line`. Bytes are passed on as they are, whatever they mean.
    """

    def __init__(
        self, pipe: IO[bytes], rank: int, name: str, sinks: list[Sink], timestamps: bool = False
    ) -> None:
        self.fd = pipe.fileno()
        self._pipe = pipe
        self._label = f"[{rank}]<{name}>:".encode()
        self._sinks = sinks
        self._timestamps = timestamps
        self._partial = b""  # a line that has not ended yet
        self._inside = False  # the start of the line was forwarded already: no label
        self._returned = False  # what was forwarded last ended in a carriage return
        os.set_blocking(self.fd, False)

    def read(self) -> bool:
        """Forward the lines in what the pipe holds now. False at its end: all writers are gone."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return True
        if data:
            self._forward(data)
        return bool(data)

    def finish(self) -> None:
        """Forward the rest, ending the last line if the rank did not, and close the pipe.

        Called when the writers are dead: a pipe holds 1 MiB at most, so this ends.
        """
        for _ in range(2 * (1 << 20) // _READ):
            if not self.read():
                break
        if self._partial or self._inside:
            self._forward(b"\n")
        self._pipe.close()

    def _forward(self, data: bytes) -> None:
        out = bytearray()
        if self._returned and data.startswith(b"\n"):  # a "\r\n" that came in two reads
            out += b"\n"
            data = data[1:]
        lines = (self._partial + data).splitlines(keepends=True)  # of bytes: at \n, \r and \r\n
        if lines and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) < LONGEST_LINE:
            self._partial = lines.pop()
        else:
            self._partial = b""
        stamp = time.ctime().encode() if self._timestamps else b""
        for line in lines:
            if not self._inside:
                out += stamp + self._label
            out += line
            self._inside = not line.endswith((b"\n", b"\r"))
        self._returned = bool(lines) and not self._partial and lines[-1].endswith(b"\r")
        for sink in self._sinks:
            sink.write(bytes(out))


def open_rank_files(directory: str, rank: int, size: int) -> list[Sink]:
    """`directory/rank.<zero padded rank>/{stdout,stderr}`, created or emptied."""
    folder = Path(directory) / f"rank.{rank:0{len(str(size - 1))}d}"
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    return [Sink(os.open(folder / name, flags, 0o666)) for name in ("stdout", "stderr")]
