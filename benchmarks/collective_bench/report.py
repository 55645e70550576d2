"""What is printed: the table, the goals, and the JSON file with the same numbers.

Ratios are "peer's median / hvdtorch's median": above 1 hvdtorch is faster.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from collective_bench.cases import Case, show_bytes
from collective_bench.measure import Timing

OURS = "hvdtorch"
_COLUMNS = (
    ("collective", 13),
    ("tensors", 7),
    ("bytes", 9),
    ("count", 9),
    ("dtype", 8),
    ("op", 7),
    ("peer", 8),
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


# ---- goals ----


@dataclass(frozen=True)
class Verdict:
    """One goal and the worst row it applies to. `ratio` as in the table; `at_least` is the goal."""

    goal: str
    at_least: float
    rows: int
    rows_met: int
    ratio: float
    worst: str

    @property
    def met(self) -> bool:
        return self.rows_met == self.rows

    def line(self) -> str:
        """For people."""
        word = "met   " if self.met else "MISSED"
        return (
            f"{word}  {self.goal}: {self.rows_met} of {self.rows} rows; "
            f"lowest ratio {self.ratio:.2f} (goal {self.at_least:.2f}), {self.worst}"
        )


_SMALL = 64 * 1024  # bytes

_GOALS = (
    (
        "one tensor below 64 KiB takes at most 1.5 times as long as Gloo",
        1 / 1.5,
        lambda row: row.tensors == 1 and row.bytes < _SMALL,
    ),
    (
        "one tensor from 64 KiB on is not slower than Gloo",
        1.0,
        lambda row: row.tensors == 1 and row.bytes >= _SMALL,
    ),
    (
        "160 tensors of 4 KB at once are at least 5 times as fast as Gloo",
        5.0,
        lambda row: row.tensors == 160 and 4000 - 8 < row.bytes <= 4096,
    ),
)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The goals that `rows` have something to say about: allreduce beside Gloo."""
    beside_gloo = [row for row in rows if row.peer == "gloo" and row.collective == "allreduce"]
    found = []
    for goal, at_least, applies in _GOALS:
        ratios = [(row.ratio or 0.0, row) for row in beside_gloo if applies(row)]
        if not ratios:
            continue
        ratio, row = min(ratios, key=lambda pair: pair[0])
        where = f"{show_bytes(row.bytes)} {row.dtype} {row.op}"
        met = sum(r >= at_least for r, _ in ratios)
        found.append(Verdict(goal, at_least, len(ratios), met, ratio, where))
    return found


# ---- where and with what ----


def machine() -> dict[str, Any]:
    """The hardware and software of this rank."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_json(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """`head`, then "rows" (fields of Row) and "goals" (fields of Verdict, and "met")."""
    document = head | {
        "rows": [asdict(row) for row in rows],
        "goals": [asdict(verdict) | {"met": verdict.met} for verdict in verdicts(rows)],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
