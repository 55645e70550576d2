"""How anything is timed.

All candidates run in one run and take turns, one sample each per round, with the order turned round
from one round to the next: whatever else the machine does hits all of them alike. A sample's time
is that of its slowest rank. Times stay on their rank until the rounds are over, so collecting them
disturbs nothing.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Sample = Callable[[], tuple[int, int]]  # runs once: (nanoseconds, wrong elements) of this rank


@dataclass(frozen=True)
class Series:
    """One candidate: nanoseconds of the slowest rank, and wrong elements of all."""

    nanoseconds: list[int]
    wrong: int


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def measure(
    candidates: Sequence[Sample], most: int, fewest: int, warm_up: int, seconds: float
) -> list[Series]:
    """Rounds over the ranks of torch.distributed's default group (a CPU one).

    After 1 + `warm_up` rounds that do not count: as many as take about `seconds`, between `fewest`
    and `most`. Every rank gets the same list, in the order of `candidates`.
    """
    _play(candidates, 1)  # connections, buffers, names
    began = time.perf_counter()
    _play(candidates, warm_up)
    rounds = _agree_on_rounds((time.perf_counter() - began) / warm_up, most, fewest, seconds)
    gc.collect()
    gc.disable()
    try:
        nanoseconds, wrong = _play(candidates, rounds)
    finally:
        gc.enable()
    dist.all_reduce(nanoseconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(wrong)
    return [
        Series(times, errors)
        for times, errors in zip(nanoseconds.tolist(), wrong.tolist(), strict=True)
    ]


def _play(candidates: Sequence[Sample], rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Times of this rank [candidates, rounds] in nanoseconds, and its wrong elements."""
    nanoseconds = torch.zeros(len(candidates), rounds, dtype=torch.int64)
    wrong = torch.zeros(len(candidates), dtype=torch.int64)
    turns = list(enumerate(candidates))
    for played in range(rounds):
        for index, sample in turns if played % 2 == 0 else reversed(turns):
            elapsed, errors = sample()
            nanoseconds[index, played] = elapsed
            wrong[index] += errors
    return nanoseconds, wrong


def _agree_on_rounds(per_round: float, most: int, fewest: int, seconds: float) -> int:
    slowest = torch.tensor(per_round, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return min(most, max(fewest, int(seconds / slowest.item())))
