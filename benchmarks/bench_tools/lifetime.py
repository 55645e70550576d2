"""A process that ends with the one that started it (Linux). Imports nothing that takes time."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """The kernel sends this process `signal_number` when its parent, process id `parent`, dies;
    0: whoever that is."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)
    if parent != 0 and os.getppid() != parent:
        sys.exit("the process that started this one is gone")
