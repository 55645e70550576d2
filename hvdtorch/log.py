"""What hvdtorch says while it runs: one logger, `hvdtorch`, in Horovod's line format.

    [2026-11-30 16:02:40.123456: I rendezvous.py:120] rank 1 of 2 on host a ...

Up to INFO to stdout, from WARNING on to stderr. An application that gives the logger a handler of
its own before `hvd.init()` keeps its own format and destinations.
"""

from __future__ import annotations

import logging
import sys
from datetime import datetime

logger = logging.getLogger("hvdtorch")

TRACE = 5
_LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_LETTERS = {level: name[0].upper() for name, level in _LEVELS.items()}


class _Lines(logging.Formatter):
    def __init__(self, hide_time: bool) -> None:
        super().__init__()
        self._hide_time = hide_time

    def format(self, record: logging.LogRecord) -> str:
        letter = _LETTERS.get(record.levelno, "I")
        head = f"{letter} {record.filename}:{record.lineno}"
        if not self._hide_time:
            head = f"{datetime.fromtimestamp(record.created):%Y-%m-%d %H:%M:%S.%f}: {head}"
        return f"[{head}] {record.getMessage()}"


class _Console(logging.Handler):
    """Finds the stream at each line: tests and notebooks replace sys.stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
            print(self.format(record), file=stream, flush=True)
        except Exception:
            self.handleError(record)


def configure(level: str, hide_time: bool) -> None:
    """Set the logger up as the settings log_level and log_hide_time say."""
    ours = [handler for handler in logger.handlers if isinstance(handler, _Console)]
    if logger.handlers and not ours:
        return
    if not ours:
        logger.addHandler(_Console())
        logger.propagate = False
    logger.setLevel(_LEVELS[level])
    logger.handlers[0].setFormatter(_Lines(hide_time))
