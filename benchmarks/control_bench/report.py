"""What is printed: two tables, and how many ranks one coordinator serves.

The control plane is a star: rank 0 reads a frame of every rank and writes one to every rank. Its
CPU time per negotiation therefore grows with the number of ranks, by a slope that the real jobs
show with sockets and the simulated ones without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from control_bench import processes, simulated

BUCKETS = 10  # negotiations per training step, of the estimate
STEP_MS = 100.0
SHARE = 0.10  # of a step that the coordinator's CPU may take before it matters
PER_NODE = 8  # ranks, of a tree by node

_REAL = (
    ("kind", 8),
    ("ranks", 5),
    ("operations", 10),
    ("median us", 10),
    ("p99 us", 10),
    ("cpu us rank 0", 13),
    ("others", 8),
    ("frames rank 0", 13),
    ("others", 6),
    ("bytes rank 0", 12),
    ("others", 7),
)
_SIMULATED = (
    ("kind", 8),
    ("names", 6),
    ("ranks", 5),
    ("tensors", 7),
    ("steps", 5),
    ("frames in", 9),
    ("bytes in", 9),
    ("frames out", 10),
    ("bytes out", 9),
    ("read us", 9),
    ("decide us", 9),
    ("write us", 9),
    ("us", 9),
    ("us/tensor/rank", 14),
)


def _aligned(cells: Sequence[str], columns: Sequence[tuple[str, int]]) -> str:
    return "  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, columns, strict=True))


def real_heading() -> str:
    """The first table's first line."""
    return _aligned([name for name, _ in _REAL], _REAL)


def real_line(row: processes.Row) -> str:
    """A line of the first table."""
    cells = [row.kind, str(row.np), str(row.operations), f"{row.median_us:.1f}"]
    cells += [f"{row.p99_us:.1f}", f"{row.cpu_rank0_us:.1f}", f"{row.cpu_other_us:.1f}"]
    cells += [f"{row.frames_rank0:.2f}", f"{row.frames_other:.2f}"]
    cells += [f"{row.bytes_rank0:.1f}", f"{row.bytes_other:.1f}"]
    return _aligned(cells, _REAL)


def simulated_heading() -> str:
    """The second table's first line."""
    return _aligned([name for name, _ in _SIMULATED], _SIMULATED)


def simulated_line(row: simulated.Row) -> str:
    """A line of the second table."""
    cells = [row.kind, "known" if row.known else "new", str(row.ranks), str(row.tensors)]
    cells += [str(row.steps), str(row.frames_in), str(row.bytes_in), str(row.frames_out)]
    cells += [str(row.bytes_out)]
    cells += [f"{us:.1f}" for us in (row.read_us, row.decide_us, row.write_us, row.us)]
    return _aligned([*cells, f"{row.us / row.tensors / row.ranks:.3f}"], _SIMULATED)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line that fits best by least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def reach(
    real: Sequence[processes.Row], modelled: Sequence[simulated.Row]
) -> tuple[list[str], dict[str, Any]]:
    """How many ranks rank 0 serves until its CPU time takes SHARE of a step: lines, and numbers."""
    allowed = STEP_MS * 1000 * SHARE / BUCKETS  # us per negotiation
    slopes = {}
    points = [(row.np, row.cpu_rank0_us) for row in real if row.kind == "barrier"]
    if len(points) >= 2:
        slopes["with sockets"] = slope(points)
    points = [
        (row.ranks, row.us)
        for row in modelled
        if row.kind == "bucket" and row.known and row.tensors == 1
    ]
    if len(points) >= 2:
        slopes["without sockets"] = slope(points)
    lines = [
        f"a step of {STEP_MS:g} ms with {BUCKETS} buckets; the coordinator may take {SHARE:.0%} of "
        f"it, {allowed:.0f} us per negotiation:"
    ]
    numbers = {}
    for name, per_rank in slopes.items():
        ranks = allowed / per_rank if per_rank > 0 else float("inf")
        numbers[name] = {"us_per_rank": per_rank, "ranks": ranks}
        lines.append(
            f"  {name}: {per_rank:.3f} us per rank and negotiation, {ranks:.0f} ranks in a star, "
            f"{ranks * PER_NODE:.0f} with one frame per node of {PER_NODE}"
        )
    return (lines if slopes else []), numbers
