"""How the ranks begin a sample at the same moment.

A rank leaves a barrier tens of microseconds after another one, which is as long as a small
collective takes. Where all ranks read one clock and each has a core, they agree on a moment a
little ahead instead, and look at the clock until then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

AHEAD = 300_000  # nanoseconds: longer than the ranks take to learn of the moment


def together() -> Callable[[], None]:
    """What every rank of torch.distributed's default group (a CPU one) calls before a sample.

    To be called by all of them at once.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    clock = boot_id.read_text() if boot_id.exists() else os.urandom(8).hex()
    clocks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(clocks, clock)
    if len(set(clocks)) > 1 or dist.get_world_size() > len(os.sched_getaffinity(0)):
        return dist.barrier
    return _at_one_moment


def _at_one_moment() -> None:
    moment = torch.tensor(time.perf_counter_ns())
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    start = int(moment.item()) + AHEAD
    while time.perf_counter_ns() < start:
        pass
