"""What is printed: one row per peer and case.

Ratios are "the row's median / hvdtorch's median": above 1 hvdtorch is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collective_bench.cases import Case
from collective_bench.measure import Timing

OURS = "hvdtorch"
_COLUMNS = (
    ("collective", 13),
    ("tensors", 7),
    ("bytes", 9),
    ("count", 9),
    ("dtype", 8),
    ("op", 7),
    ("peer", 14),
    ("samples", 7),
    ("median us", 10),
    ("p99 us", 10),
    ("algbw GB/s", 10),
    ("busbw GB/s", 10),
    ("ratio", 6),
    ("wrong", 5),
)


@dataclass(frozen=True)
class Row:
    """One line of the table: one peer on one case. `bytes` and `count` are of one tensor."""

    collective: str
    tensors: int
    bytes: int
    count: int
    dtype: str
    op: str
    peer: str
    samples: int
    median_us: float
    p99_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    ratio: float | None  # None on hvdtorch's own row
    wrong: int

    def line(self) -> str:
        """Aligned with `heading()`."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        cells = [
            self.collective,
            str(self.tensors),
            str(self.bytes),
            str(self.count),
            self.dtype,
            self.op,
            self.peer,
            str(self.samples),
            f"{self.median_us:.1f}",
            f"{self.p99_us:.1f}",
            f"{self.algbw_gb_s:.3f}",
            f"{self.busbw_gb_s:.3f}",
            ratio,
            str(self.wrong),
        ]
        return "  ".join(c.rjust(width) for c, (_, width) in zip(cells, _COLUMNS, strict=True))


def heading() -> str:
    """The table's first line."""
    return "  ".join(name.rjust(width) for name, width in _COLUMNS)


def rows_of(case: Case, timings: Sequence[Timing]) -> list[Row]:
    """One row per peer, in the order of `timings`."""
    ours = next(t for t in timings if t.peer == OURS)
    return [
        Row(
            collective=case.collective,
            tensors=case.tensors,
            bytes=case.count * case.dtype.itemsize,
            count=case.count,
            dtype=case.dtype_name,
            op=case.op,
            peer=t.peer,
            samples=t.samples,
            median_us=t.median_us,
            p99_us=t.p99_us,
            algbw_gb_s=case.algbw(t.median_us / 1e6),
            busbw_gb_s=case.busbw(t.median_us / 1e6),
            ratio=None if t.peer == OURS else t.median_us / ours.median_us,
            wrong=t.wrong,
        )
        for t in timings
    ]
