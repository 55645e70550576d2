"""What is printed: a row per model and column, and the goals.

Ratios are "median / median of the independent processes": the price of communication. The cost per
tensor is the difference of the two, divided by the number of parameter tensors.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench_tools.rounds import Series, percentile

BASELINE = "independent"
OURS = "hvdtorch"
RATIO_GOALS = {"deep": 1.10, "wide": 1.25}  # at 2 ranks
HOOK_MODEL, HOOK_GOAL_US = "deep", 2.0
IDLE_SLOWDOWN_GOAL = 1.01
LOSS_TOLERANCE = 1e-3  # relative, over the first steps: sums in another order, another torch
_COLUMNS = (
    ("model", 9),
    ("tensors", 7),
    ("parameters", 10),
    ("trainer", 13),
    ("samples", 7),
    ("median ms", 9),
    ("p99 ms", 9),
    ("ratio", 6),
    ("us/tensor", 9),
    ("loss off by", 11),
    ("weights", 9),
)


@dataclass(frozen=True)
class Row:
    """One trainer on one model. Times of one step."""

    model: str
    tensors: int
    parameters: int
    trainer: str
    samples: int
    median_ms: float
    p99_ms: float
    ratio: float
    us_per_tensor: float
    loss_off_by: float | None  # relative, from one process with averaged gradients; None: no claim
    same_weights: bool | None  # on all ranks, bit for bit, at the end

    @property
    def wrong(self) -> bool:
        """What must not happen."""
        return self.same_weights is False or (self.loss_off_by or 0.0) > LOSS_TOLERANCE

    def line(self) -> str:
        """Aligned with `heading()`."""
        off = "" if self.loss_off_by is None else f"{self.loss_off_by:.1e}"
        weights = {None: "", True: "same", False: "DIFFERENT"}[self.same_weights]
        cells = [
            self.model,
            str(self.tensors),
            str(self.parameters),
            self.trainer,
            str(self.samples),
            f"{self.median_ms:.2f}",
            f"{self.p99_ms:.2f}",
            f"{self.ratio:.3f}",
            f"{self.us_per_tensor:.2f}",
            off,
            weights,
        ]
        return "  ".join(c.rjust(width) for c, (_, width) in zip(cells, _COLUMNS, strict=True))


def heading() -> str:
    """The table's first line."""
    return "  ".join(name.rjust(width) for name, width in _COLUMNS)


def rows_of(
    model: str,
    tensors: int,
    parameters: int,
    found: Sequence[tuple[str, Series, float | None, bool | None]],
) -> list[Row]:
    """`found`: trainer, its samples, its losses' deviation, whether all ranks' weights are equal;
    the baseline is one of them."""
    medians = {name: statistics.median(series.nanoseconds) for name, series, _, _ in found}
    baseline = medians[BASELINE]
    return [
        Row(
            model=model,
            tensors=tensors,
            parameters=parameters,
            trainer=name,
            samples=len(series.nanoseconds),
            median_ms=medians[name] / 1e6,
            p99_ms=percentile(series.nanoseconds, 0.99) / 1e6,
            ratio=medians[name] / baseline,
            us_per_tensor=(medians[name] - baseline) / 1000 / tensors,
            loss_off_by=off_by,
            same_weights=same,
        )
        for name, series, off_by, same in found
    ]


@dataclass(frozen=True)
class Verdict:
    """One goal: `found` must be at most `limit`."""

    goal: str
    limit: float
    found: float

    @property
    def met(self) -> bool:
        return self.found <= self.limit

    def line(self) -> str:
        """For people."""
        word = "met   " if self.met else "MISSED"
        return f"{word}  {self.goal}: {self.found:.3f} (at most {self.limit:.3f})"


def step_verdicts(rows: Sequence[Row], size: int) -> Iterator[Verdict]:
    """Of the table; goals are stated for 2 ranks."""
    for row in rows if size == 2 else ():
        if row.trainer == OURS and row.model in RATIO_GOALS:
            goal = f"{row.model}: a step's time over that of independent processes"
            yield Verdict(goal, RATIO_GOALS[row.model], row.ratio)
        if row.trainer == OURS and row.model == HOOK_MODEL:
            goal = f"{row.model}: all that a step costs more, in us per parameter tensor"
            yield Verdict(goal, HOOK_GOAL_US, row.us_per_tensor)


def alone_verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Of a run on one rank, where nothing is exchanged."""
    for row in rows:
        if row.trainer == OURS and row.model == HOOK_MODEL:
            goal = f"{row.model}: hooks and bookkeeping of 1 rank alone, in us per parameter tensor"
            yield Verdict(goal, HOOK_GOAL_US, row.us_per_tensor)
