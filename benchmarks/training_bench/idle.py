"""What an initialised and idle hvdtorch costs: context switches of its threads, and how much slower
a loop of matrix products is beside it."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SETTLE_SECONDS = 0.5
PRODUCT = 256  # rows and columns
PRODUCTS = 40  # per sample, some 20 ms


@dataclass(frozen=True)
class Thread:
    """A thread of this process and how often it was switched out so far."""

    id: int
    name: str
    switches: int


def threads() -> list[Thread]:
    """Of this process; a thread's name is the one it gave itself."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
        fields = dict(line.split(":", 1) for line in lines)
        both = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
        switched = sum(int(fields[field]) for field in both)
        found.append(Thread(int(task.name), fields["Name"].strip(), switched))
    return found


def switches(seconds: float) -> dict[str, int]:
    """Context switches within `seconds` of the threads that hvd.init() started, by thread name and
    summed over the ranks; leaves hvdtorch initialised."""
    import hvdtorch as hvd

    before = {thread.id for thread in threads()}
    hvd.init()
    time.sleep(SETTLE_SECONDS)
    dist.barrier()
    started = {t.id: t.switches for t in threads() if t.id not in before}
    time.sleep(seconds)
    counts: dict[str, int] = {}
    for thread in threads():
        if thread.id in started:
            grown = thread.switches - started[thread.id]
            counts[thread.name] = counts.get(thread.name, 0) + grown
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, counts)
    return {name: sum(g.get(name, 0) for g in gathered) for name in sorted(set().union(*gathered))}


@dataclass(frozen=True)
class Loop:
    """Medians of the loop in milliseconds, without hvdtorch and with it, of all ranks at once."""

    samples: int
    without_ms: float
    with_ms: float

    @property
    def slowdown(self) -> float:
        return self.with_ms / self.without_ms


def loop(turns: int, samples: int) -> Loop:
    """So many samples in each of so many turns; hvdtorch, initialised before, is left and joined
    again in between."""
    import hvdtorch as hvd

    matrix = torch.randn(PRODUCT, PRODUCT)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(turns):
        times[True] += _time(matrix, samples)
        hvd.shutdown()
        times[False] += _time(matrix, samples)
        hvd.init()
    found = [statistics.median(times[present]) for present in (False, True)]
    mean = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(mean)
    without_ms, with_ms = (mean / dist.get_world_size()).tolist()
    return Loop(turns * samples, without_ms, with_ms)


def _time(matrix: torch.Tensor, samples: int) -> list[float]:
    time.sleep(SETTLE_SECONDS)
    dist.barrier()
    found = []
    for _ in range(samples):
        begin = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)
        found.append((time.perf_counter() - begin) * 1000)
    return found


def document(seconds: float, turns: int, samples: int) -> dict[str, Any]:
    """Both, for the JSON file; hvdtorch is left afterwards."""
    import hvdtorch as hvd

    counted = switches(seconds)
    timed = loop(turns, samples)
    hvd.shutdown()
    return {
        "seconds": seconds,
        "switches": counted,
        "loop": asdict(timed) | {"slowdown": timed.slowdown},
    }
