"""What every peer did on a case: rounds of samples (bench_tools/rounds.py), in microseconds.

All ranks begin a sample at the same moment, on a sign that belongs to no peer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from bench_tools import rounds
from bench_tools.rounds import percentile
from bench_tools.start import together

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


class Bench:
    """Measures cases on the ranks of torch.distributed's default group, which must be a CPU one."""

    def __init__(self, peers: Sequence[Peer], rounds: int, seconds: float) -> None:
        """At most `rounds` rounds and about `seconds` per case, but FEWEST_ROUNDS if allowed."""
        self._peers = peers
        self._start = together()
        self._rounds = rounds
        self._seconds = seconds

    def measure(self, case: Case) -> list[Timing]:
        """Timings of the peers that can do it, in their order, the same on every rank."""
        peers = [peer for peer in self._peers if peer.takes(case)]
        for peer in peers:
            peer.prepare(case, dist.get_rank())
        found = rounds.measure(
            [partial(peer.sample, self._start) for peer in peers],
            most=self._rounds,
            fewest=FEWEST_ROUNDS,
            warm_up=WARM_UP_ROUNDS,
            seconds=self._seconds,
        )
        return [
            Timing(
                peer=peer.name,
                samples=len(series.nanoseconds),
                median_us=statistics.median(series.nanoseconds) / 1000,
                p99_us=percentile(series.nanoseconds, 0.99) / 1000,
                wrong=series.wrong,
            )
            for peer, series in zip(peers, found, strict=True)
        ]
