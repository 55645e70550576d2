"""The goals: which rows have to take at most which share of whose time.

Shares are "hvdtorch's median / the other's median" of one run, on ranks of one host; below 1
hvdtorch is faster. They are stated for 2 ranks, and for 4 ranks on 2 cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from collective_bench.cases import show_bytes
from collective_bench.peers import IN_COMPANION, OURS
from collective_bench.report import Row

KIB, MIB = 2**10, 2**20
SIZES = (4, 4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)  # of float32, that goals speak of
MANY = ((160, 4000), (160, 100_000))
COUNT = 64 * MIB // 4  # elements of the largest: bfloat16 is compared at the same count

HVDTORCH, ARENA = OURS
GLOO = ("gloo",)
ANYONE = (*GLOO, *IN_COMPANION)


@dataclass(frozen=True)
class Goal:
    """`ours` takes at most `share` of the time of the best of `others`, in rows of `nbytes`."""

    nbytes: tuple[int, ...]
    share: float
    others: tuple[str, ...]
    ours: str = HVDTORCH
    tensors: int = 1


GOALS = {
    2: (
        Goal((4,), 1 / 3, GLOO),
        Goal((4,), 1 / 20, IN_COMPANION),
        Goal((4 * KIB, 256 * KIB), 1 / 4, ANYONE),
        Goal((4 * MIB,), 1 / 2, ANYONE),
        Goal((64 * MIB,), 1 / 2, ANYONE),
        Goal((64 * MIB,), 1 / 3, ANYONE, ARENA),
        Goal((4000,), 1 / 5, ANYONE, tensors=160),
        Goal((100_000,), 1 / 3, ANYONE, tensors=160),
    ),
    4: (
        *(Goal((size,), 1.0, ANYONE) for size in SIZES[:-1]),
        Goal((64 * MIB,), 1 / 2, ANYONE),
        *(Goal((size,), 1.0, ANYONE, tensors=tensors) for tensors, size in MANY),
    ),
}
LONGEST_TAIL = 10.0  # p99 of 4 B over its median, at 2 ranks
BFLOAT16_SHARE = 0.6  # of float32's time, at COUNT elements and 2 ranks


@dataclass(frozen=True)
class Verdict:
    """One goal and the row that it was judged by. `found` and `limit`: what `goal` says of what."""

    goal: str
    limit: float
    found: float
    detail: str

    @property
    def met(self) -> bool:
        return self.found <= self.limit

    def line(self) -> str:
        """For people."""
        word = "met   " if self.met else "MISSED"
        return f"{word}  {self.goal}: {self.found:.3f} (at most {self.limit:.3f}); {self.detail}"


def verdicts(rows: Sequence[Row], size: int) -> list[Verdict]:
    """What `rows` of a run on `size` ranks say about the goals; nothing where a row is missing."""
    table = {(r.tensors, r.bytes, r.peer): r for r in rows if _speaks(r, "float32")}
    found = [_judge(goal, nbytes, table) for goal in GOALS.get(size, ()) for nbytes in goal.nbytes]
    if size == 2:
        found += [*_tail(table), *_bfloat16(rows)]
    return [verdict for verdict in found if verdict is not None]


def _speaks(row: Row, dtype: str) -> bool:
    return (row.collective, row.dtype, row.op) == ("allreduce", dtype, "sum")


def _judge(goal: Goal, nbytes: int, table: dict[tuple[int, int, str], Row]) -> Verdict | None:
    ours = table.get((goal.tensors, nbytes, goal.ours))
    others = [r for p in goal.others if (r := table.get((goal.tensors, nbytes, p))) is not None]
    if ours is None or not others:
        return None
    best = min(others, key=lambda row: row.median_us)
    many = f"{goal.tensors} x " if goal.tensors > 1 else ""
    whose = {GLOO: "Gloo's", IN_COMPANION: "Horovod's best"}.get(goal.others, "the best peer's")
    missing = [name for name in goal.others if name not in {row.peer for row in others}]
    not_here = f" (not measured: {', '.join(missing)})" if missing else ""
    return Verdict(
        f"{many}{show_bytes(nbytes)} of {goal.ours}, share of {whose} time",
        goal.share,
        ours.median_us / best.median_us,
        f"{ours.median_us:.1f} us, {best.peer} {best.median_us:.1f} us{not_here}",
    )


def _tail(table: dict[tuple[int, int, str], Row]) -> Iterator[Verdict]:
    if row := table.get((1, 4, HVDTORCH)):
        detail = f"{row.p99_us:.1f} us of {row.samples} samples"
        yield Verdict("4 B, p99 over median", LONGEST_TAIL, row.p99_us / row.median_us, detail)


def _bfloat16(rows: Sequence[Row]) -> Iterator[Verdict]:
    def find(dtype: str) -> Row | None:
        wanted = (1, COUNT, HVDTORCH)
        fitting = (r for r in rows if (r.tensors, r.count, r.peer) == wanted and _speaks(r, dtype))
        return next(fitting, None)

    narrow, wide = find("bfloat16"), find("float32")
    if narrow and wide:
        yield Verdict(
            f"{COUNT} bfloat16, share of the time of as many float32",
            BFLOAT16_SHARE,
            narrow.median_us / wide.median_us,
            f"{narrow.median_us:.1f} us, {wide.median_us:.1f} us",
        )
