"""Lines from many ranks to one console: labels, carriage returns, odd bytes, slow readers."""

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from hvdtorch.launch import output
from hvdtorch.launch.output import Console, Sink, Stream


class Wire:
    """A rank's pipe into a stream, and what the console's reader sees."""

    def __init__(self) -> None:
        read_end, self.rank = os.pipe()
        self.console, sink_end = os.pipe()
        self.sink = Sink(sink_end)
        self.stream = Stream(os.fdopen(read_end, "rb", buffering=0), 3, "stdout", [self.sink])
        os.set_blocking(self.console, False)

    def pass_on(self, data: bytes) -> bytes:
        """What comes out at once when the rank writes `data`."""
        os.write(self.rank, data)
        self.stream.read()
        return self.seen()

    def end(self) -> bytes:
        os.close(self.rank)
        self.rank = -1
        self.stream.finish()
        return self.seen()

    def seen(self) -> bytes:
        data = b""
        with suppress(BlockingIOError):
            while more := os.read(self.console, 1 << 16):
                data += more
                self.sink.flush()
        return data


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    if wire.rank >= 0:
        wire.end()
    for fd in (wire.console, wire.sink.fd):
        os.close(fd)


def test_each_line_is_labelled(wire: Wire) -> None:
    assert wire.pass_on(b"a\n\nb\n") == b"[3]<stdout>:a\n[3]<stdout>:\n[3]<stdout>:b\n"


def test_a_line_is_held_until_it_ends(wire: Wire) -> None:
    assert wire.pass_on(b"ab") == b""
    assert wire.pass_on(b"c\nd") == b"[3]<stdout>:abc\n"
    assert wire.end() == b"[3]<stdout>:d\n"


def test_nothing_is_added_after_a_line_that_ended(wire: Wire) -> None:
    assert wire.pass_on(b"a\n") == b"[3]<stdout>:a\n"
    assert wire.end() == b""


def test_a_progress_bar_is_passed_on_at_each_carriage_return(wire: Wire) -> None:
    assert wire.pass_on(b" 10%\r") == b"[3]<stdout>: 10%\r"
    assert wire.pass_on(b" 20%\r 30%") == b"[3]<stdout>: 20%\r"
    assert wire.pass_on(b"\n") == b"[3]<stdout>: 30%\n"


def test_a_dos_line_end_is_one_end_even_in_two_parts(wire: Wire) -> None:
    assert wire.pass_on(b"a\r\nb\r\n") == b"[3]<stdout>:a\r\n[3]<stdout>:b\r\n"
    assert wire.pass_on(b"c\r") + wire.pass_on(b"\nd\n") == b"[3]<stdout>:c\r\n[3]<stdout>:d\n"
    assert wire.pass_on(b"e\r") + wire.pass_on(b"f\n") == b"[3]<stdout>:e\r[3]<stdout>:f\n"


def test_any_bytes_pass(wire: Wire) -> None:
    odd = bytes(byte for byte in range(256) if byte not in b"\r\n") + b"\x85\xe2\x80\xa8"
    assert wire.pass_on(odd + b"\n") == b"[3]<stdout>:" + odd + b"\n"


def test_an_endless_line_is_passed_on_in_pieces_with_one_label(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LONGEST_LINE", 10)
    assert wire.pass_on(b"0123456789") == b"[3]<stdout>:0123456789"
    assert wire.pass_on(b"abc\nd\n") == b"abc\n[3]<stdout>:d\n"
    assert wire.pass_on(b"0123456789") == b"[3]<stdout>:0123456789"
    assert wire.end() == b"\n"


def test_a_sink_never_blocks_and_loses_nothing(wire: Wire) -> None:
    data = b"x" * (1 << 21)  # more than any pipe holds
    wire.sink.write(data)
    assert wire.sink.backlog > 0
    assert wire.seen() == data
    assert wire.sink.backlog == 0


def test_a_reader_that_went_away_ends_nothing() -> None:
    read_end, write_end = os.pipe()
    sink = Sink(write_end)
    os.close(read_end)
    sink.write(b"x" * 10)
    assert sink.closed
    sink.write(b"y")
    assert sink.backlog == 0
    os.close(write_end)


def test_one_file_for_both_streams_is_one_sink() -> None:
    pipe, other = os.pipe(), os.pipe()
    copy = os.dup(pipe[1])
    console = Console(pipe[1], copy)
    assert console.stdout is console.stderr
    assert len(console.sinks) == 1
    assert len(Console(pipe[1], other[1]).sinks) == 2
    for fd in (*pipe, *other, copy):
        os.close(fd)
