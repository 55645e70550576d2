"""How it is measured.

All peers run in the same processes and take turns, one sample each per round, with the order turned
round from one round to the next: whatever else the machine does hits all of them alike. A barrier
precedes each sample; a sample's time is that of its slowest rank. Times stay on their rank until
the case is done, so collecting them disturbs nothing.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from collective_bench.cases import Case
from collective_bench.peers import Peer

WARM_UP_ROUNDS = 5
FEWEST_ROUNDS = 10


@dataclass(frozen=True)
class Timing:
    """What one peer did on one case. Times in microseconds, of the slowest rank per sample."""

    peer: str
    samples: int
    median_us: float
    p99_us: float
    wrong: int  # elements, over all timed samples and ranks


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Bench:
    """Measures cases on the ranks of torch.distributed's default group, which must be a CPU one."""

    def __init__(self, peers: Sequence[Peer], rounds: int, seconds: float) -> None:
        """At most `rounds` rounds and about `seconds` per case, but FEWEST_ROUNDS if allowed."""
        self._peers = peers
        self._rounds = rounds
        self._seconds = seconds
        self._rank = dist.get_rank()

    def measure(self, case: Case) -> list[Timing]:
        """Timings of all peers, in their order, the same on every rank."""
        for peer in self._peers:
            peer.prepare(case, self._rank)
        self._play(1)  # connections, buffers, names
        began = time.perf_counter()
        self._play(WARM_UP_ROUNDS)
        rounds = self._agree_on_rounds((time.perf_counter() - began) / WARM_UP_ROUNDS)
        gc.collect()
        gc.disable()
        try:
            nanoseconds, wrong = self._play(rounds)
        finally:
            gc.enable()
        dist.all_reduce(nanoseconds, op=dist.ReduceOp.MAX)
        dist.all_reduce(wrong)
        return [
            Timing(
                peer=peer.name,
                samples=rounds,
                median_us=statistics.median(times) / 1000,
                p99_us=percentile(times, 0.99) / 1000,
                wrong=errors,
            )
            for peer, times, errors in zip(
                self._peers, nanoseconds.tolist(), wrong.tolist(), strict=True
            )
        ]

    def _play(self, rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Times of this rank [peers, rounds] in nanoseconds, and its wrong elements [peers]."""
        nanoseconds = torch.zeros(len(self._peers), rounds, dtype=torch.int64)
        wrong = torch.zeros(len(self._peers), dtype=torch.int64)
        turns = list(enumerate(self._peers))
        for played in range(rounds):
            for index, peer in turns if played % 2 == 0 else reversed(turns):
                elapsed, errors = peer.sample(dist.barrier)
                nanoseconds[index, played] = elapsed
                wrong[index] += errors
        return nanoseconds, wrong

    def _agree_on_rounds(self, seconds_per_round: float) -> int:
        slowest = torch.tensor(seconds_per_round, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return min(self._rounds, max(FEWEST_ROUNDS, int(self._seconds / slowest.item())))
