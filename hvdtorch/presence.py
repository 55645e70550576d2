"""What a rank says of itself to the others: it has no more data, or it is busy for a while."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import _C
from .operation import JOIN, SUM

_interrupted: _C.Handle | None = None  # a join() that Ctrl-C, say, got this rank out of
_pauses: list[float] = []  # when each `expected_stall` that this rank is in ends

_after_join: list[Callable[[], None]] = []


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Meanwhile the operations of the other ranks go on without this one, in all process sets:

    - reductions are among the ranks that still take part. Average divides by the size of the
      process set nevertheless, or, with HVDTORCH_JOIN_DIVISOR=active, by their number;
    - allgather has no rows of a joined rank; alltoall none from it, and drops those for it;
      reducescatter drops its share;
    - broadcast from a joined root, and adding or removing a process set, are a
      `HorovodInternalError` on the ranks that call it.

    What this rank submitted before, asynchronously, still has its part. Afterwards all ranks take
    part again. A rank that Ctrl-C got out of join() is still joined: the next join() waits on.

    Parameters
    ----------
    device : int
        Accepted, and of no consequence: a joined rank needs no memory for its part.

    Returns
    -------
    int
        The global rank that was the last to join, on all ranks.

    Raises
    ------
    HorovodInternalError
        hvdtorch is not running, or a rank left the job.
    ValueError
        Another thread of this rank is in join().
    TypeError
        `device` is no int.
    """
    global _interrupted
    try:
        operator.index(device)
    except TypeError:
        raise TypeError(f"join: device must be an int, not {device!r}; leave it out") from None
    handle, _interrupted = _interrupted, None
    if handle is None or handle.error() is not None:  # it may have ended with its job
        try:
            handle = _C.submit(
                JOIN, "join.noname", "join", [], False, False, SUM, 1.0, 1.0, 0, None, 0
            )
        except ValueError:  # the name is in flight
            raise ValueError(
                "join: this rank is already in hvd.join(), on another thread; call it once per rank"
            ) from None
    try:
        handle.wait()
    except BaseException:
        _interrupted = handle
        raise
    _C.renumber_unnamed()
    for callback in _after_join:
        callback()
    return handle.numbers()[0]


def on_join(callback: Callable[[], None]) -> None:
    """Have `callback()` run at the end of each join (for modules that count what ranks do)."""
    _after_join.append(callback)


@contextmanager
def expected_stall(seconds: float) -> Iterator[None]:
    """Inside, this rank may submit nothing for up to `seconds` without being reported as stalled.

        with hvd.expected_stall(600):
            evaluate(model)

    Nor does HVDTORCH_STALL_SHUTDOWN_TIME_SECONDS count that time. Only the rank that keeps the
    others waiting needs to say so. May be nested: the one that ends last counts. Raises ValueError
    unless `seconds` is a positive number, HorovodInternalError if hvdtorch is not running.
    """
    if not (isinstance(seconds, (int, float)) and seconds > 0):
        raise ValueError(f"expected_stall: seconds must be a positive number, not {seconds!r}")
    end = time.monotonic() + seconds
    _pauses.append(end)
    try:
        _announce_pauses()
        yield
    finally:
        _pauses.remove(end)
        if _C.is_running():
            _announce_pauses()


def _announce_pauses() -> None:
    _C.excuse(max(0.0, max(_pauses, default=0.0) - time.monotonic()))
