"""What is measured: one collective on one or several tensors of one size, dtype and op.

A `Case` knows its input on every rank, the exact result, and how a time becomes a bandwidth.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

COLLECTIVES = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
REDUCING = ("allreduce", "reducescatter")  # these have an op
OPS = ("sum", "average")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.int8,
        torch.uint8,
    )
}
ROOT = 0  # of broadcasts
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str) -> int:
    """ "4KiB" -> 4096, "4KB" -> 4000, "4" -> 4. ValueError for anything else."""
    match = re.fullmatch(r"(\d+)([KMG]i?B|B)?", text.strip())
    if not match or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size: write 4B, 4KB (4000 bytes), 4KiB (4096), 64MiB")
    return int(match[1]) * _UNITS[match[2] or "B"]


def show_bytes(count: int) -> str:
    """4096 -> "4 KiB", 4000 -> "4 KB"; the shortest exact form."""
    for unit, factor in sorted(_UNITS.items(), key=lambda item: -item[1]):
        if count % factor == 0 and count >= factor:
            return f"{count // factor} {unit}"
    return f"{count} B"


@dataclass(frozen=True)
class Case:
    """One line of the benchmark.

    `nbytes` is what one rank holds per tensor: the gathered result for allgather, the whole input
    otherwise. With `tensors` > 1 all are started, then all are waited for.
    """

    collective: str
    nbytes: int
    dtype_name: str
    op: str  # one of OPS for REDUCING, "-" otherwise
    size: int  # ranks
    tensors: int = 1

    def __post_init__(self) -> None:
        largest = self._largest_value()
        exact = (
            2 / torch.finfo(self.dtype).eps
            if self.dtype.is_floating_point
            else torch.iinfo(self.dtype).max
        )
        if largest > exact:
            raise ValueError(
                f"{self.collective} of {self.dtype_name} on {self.size} ranks cannot be checked: "
                f"its results reach {largest}, and {self.dtype_name} is exact up to {exact:g} only"
            )

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def count(self) -> int:
        """Elements of one tensor as `nbytes` has it, at least 1; rounded up to equal parts of all
        ranks where the collective has such parts."""
        count = max(1, self.nbytes // self.dtype.itemsize)
        in_parts = self.collective not in ("allreduce", "broadcast")
        return count + -count % self.size if in_parts else count

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return self.count * self.dtype.itemsize * self.tensors

    def title(self) -> str:
        """For people: "allreduce 160 x 4 KB float32 sum"."""
        many = f"{self.tensors} x " if self.tensors > 1 else ""
        words = [self.collective, many + show_bytes(self.nbytes), self.dtype_name, self.op]
        return " ".join(word for word in words if word != "-")

    # ---- input and result ----
    #
    # Small integers, exact in every dtype together with all their partial sums, so a result is
    # right or wrong and needs no tolerance. The first term has no period, so a block that lands in
    # a wrong place shows; the second differs between ranks, so a rank counted twice shows.

    def _largest_value(self) -> int:
        if self.collective in REDUCING:
            return self.size * 4 + self.size * (self.size - 1) // 2
        return 4 + self.size - 1

    def _positions(self, tensor: int) -> torch.Tensor:
        length = self.count // self.size if self.collective == "allgather" else self.count
        return torch.arange(tensor, tensor + length, dtype=torch.int64)

    def _place_term(self, tensor: int) -> torch.Tensor:
        hashed = self._positions(tensor) * 2_654_435_761 & 0xFFFFFFFF  # Knuth's multiplicative hash
        return (hashed >> 13) % 5

    def input(self, rank: int, tensor: int = 0) -> torch.Tensor:
        """What rank `rank` puts in: [count], for allgather [count / ranks]."""
        rank_term = (self._positions(tensor) + rank) % self.size
        return (self._place_term(tensor) + rank_term).to(self.dtype)

    def result(self, rank: int, tensor: int = 0) -> torch.Tensor:
        """What rank `rank` must hold afterwards: [count], for reducescatter [count / ranks]."""
        if self.collective == "broadcast":
            return self.input(ROOT, tensor)
        if self.collective == "allgather":
            return torch.cat([self.input(source, tensor) for source in range(self.size)])
        if self.collective == "alltoall":
            inputs = (self.input(source, tensor) for source in range(self.size))
            return torch.cat([self._part(whole, rank) for whole in inputs])
        reduced = self._reduced(tensor)
        return self._part(reduced, rank) if self.collective == "reducescatter" else reduced

    def _part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        return whole.chunk(self.size)[rank]

    def _reduced(self, tensor: int) -> torch.Tensor:
        sums = self._place_term(tensor) * self.size + self.size * (self.size - 1) // 2
        if self.op == "sum":
            return sums.to(self.dtype)
        if self.dtype.is_floating_point:  # an integer or a half: exact
            return (sums.to(torch.float64) / self.size).to(self.dtype)
        return torch.div(sums, self.size, rounding_mode="trunc").to(self.dtype)

    # ---- bandwidth ----

    def algbw(self, seconds: float) -> float:
        """Algorithm bandwidth in GB/s (10^9): bytes of the operation over its time."""
        return self.total_bytes / seconds / 1e9

    def busbw(self, seconds: float) -> float:
        """Bus bandwidth in GB/s (10^9): algbw times the traffic that a byte costs at least.

        With n ranks, each rank must send and receive for every byte of the operation

            allreduce      2 (n - 1) / n    (reducescatter, then allgather)
            allgather        (n - 1) / n    (all but its own part)
            alltoall         (n - 1) / n    (likewise)
            reducescatter    (n - 1) / n    (likewise)
            broadcast      1                (each byte leaves the root once)

        so the number compares with the speed of the link whatever n is. Source: NVIDIA nccl-tests,
        doc/PERFORMANCE.md ("Bandwidth"), https://github.com/NVIDIA/nccl-tests.
        """
        n = self.size
        factor = {"allreduce": 2 * (n - 1) / n, "broadcast": 1.0}
        return self.algbw(seconds) * factor.get(self.collective, (n - 1) / n)
