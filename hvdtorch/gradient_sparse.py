"""Reduction of sparse gradients, such as those of `nn.Embedding(sparse=True)`, within a round.

A rank that sees no sparse gradient for a parameter cannot know that another one does: it may have
none, or a dense one in flight. So a round in which some rank has announced a sparse gradient begins
with an exchange: for each such slot, every rank says what it has. From that all ranks take the same
decision. In the ordinary case that is two allgathers, of the indices and of the values, to which a
rank without a gradient contributes no rows; the sum is computed by every rank from all rows, in
the order of ranks, so that all hold the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from . import _C
from .exceptions import HorovodInternalError
from .gradient_groups import Meeting, Slot, coo, gather
from .operation import ALLREDUCE, AVERAGE, SUM
from .process_sets import ProcessSet

NONE, DENSE, COO, OTHER = range(4)

_submit = _C.submit


class Layout(NamedTuple):
    """What one rank has for a slot."""

    rank: int  # global
    kind: int  # NONE, DENSE, COO or OTHER
    sparse_dim: int  # of a COO tensor, else 0
    in_flight: int  # how many reductions of it are to be completed as those of a dense tensor


class Layouts(list[Layout]):
    """What all ranks that take part have for a slot."""

    @property
    def sparse_dim(self) -> int:
        return max(layout.sparse_dim for layout in self)

    @property
    def in_flight(self) -> int:
        return max(layout.in_flight for layout in self)

    def refusal(self, slot: Slot) -> Exception | None:
        """Why the slot cannot be reduced; the same on all ranks. None if it can be."""
        settings, name = slot.group.settings, f"the gradient of {slot.name!r}"
        sparse = f"{name} is sparse on {self._ranks(COO)}"
        if self._has(OTHER):
            return ValueError(
                f"{name} has a sparse layout on {self._ranks(OTHER)} that cannot be reduced: only "
                "torch.sparse_coo can"
            )
        if settings.sparse_as_dense:
            return None
        if slot.bucket is not None:
            return ValueError(
                f"{sparse}, and a group of groups= takes dense gradients only: leave the parameter "
                "out of groups, or wrap the optimizer with sparse_as_dense=True"
            )
        if settings.op not in (AVERAGE, SUM):
            return ValueError(
                f"{sparse}: sparse gradients have only op=hvd.Average and hvd.Sum; wrap the "
                "optimizer with sparse_as_dense=True"
            )
        if self._has(DENSE):
            return HorovodInternalError(
                f"{sparse}, and dense on {self._ranks(DENSE)}: use the parameter in the same way "
                "on all ranks, or wrap the optimizer with sparse_as_dense=True"
            )
        if any(0 < layout.sparse_dim < self.sparse_dim for layout in self):
            dims = ", ".join(f"{each.sparse_dim} (rank {each.rank})" for each in self)
            return HorovodInternalError(f"{name} has different numbers of sparse dims: {dims}")
        return None

    def _has(self, kind: int) -> bool:
        return any(layout.kind == kind for layout in self)

    def _ranks(self, kind: int) -> str:
        ranks = [str(layout.rank) for layout in self if layout.kind == kind]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def layout_of(slot: Slot, in_flight: int, accumulated: bool, rank: int) -> Layout:
    """What this rank has for a slot: reductions in flight, or what is `accumulated` here, if the
    op tells it from what an earlier round has left in `.grad`."""
    gradient = slot.gradient()
    if in_flight:
        return Layout(rank, DENSE, 0, in_flight)
    if gradient is None or (slot.group.separate and not accumulated):
        return Layout(rank, NONE, 0, 0)
    if gradient.layout is torch.sparse_coo:
        return Layout(rank, COO, gradient.sparse_dim(), 0)
    return Layout(rank, DENSE if gradient.layout is torch.strided else OTHER, 0, 0)


def exchange(
    layouts: list[Layout], process_set: ProcessSet
) -> Meeting[tuple[list[Layouts], float]]:
    """What all ranks have for each slot; and the part of the ranks that an average counts.

    That part is 1 unless ranks have joined. It is asked of the core, as the average of ones.
    """
    number = process_set.process_set_id or 0
    rows = torch.tensor([layouts])  # [1, slots, fields]
    share = torch.ones(1, dtype=torch.float64)
    handles = [
        gather("hvdtorch.gradient_layouts", rows, number),
        _submit(
            ALLREDUCE,
            "allreduce.hvdtorch.gradient_share",
            "allreduce",
            [share],
            False,
            True,
            AVERAGE,
            1.0,
            1.0,
            0,
            None,
            number,
        ),
    ]
    yield from _wait(handles)
    everyones = handles[0].outputs()[0].transpose(0, 1).tolist()
    return [Layouts(Layout(*row) for row in rows) for rows in everyones], share.item()


class SparseReduction:
    """The reduction of one sparse gradient, in flight."""

    def __init__(self, slot: Slot, gradient: Tensor, process_set: int) -> None:
        self.slot = slot
        self._gradient = gradient
        own = gradient.detach()
        own = _summed(own._indices(), own._values(), own.shape)
        values = _scaled(own.values(), slot.group.prescale).to(gradient.dtype)
        self.handles = [
            gather(f"{slot.name}.indices", own.indices().t().contiguous(), process_set),
            gather(f"{slot.name}.values", values, process_set),
        ]

    def write(self, share: float, ranks: int) -> None:
        """Put the result into the gradient, coalesced; see `exchange`."""
        group, gradient = self.slot.group, self._gradient
        indices, rows = (handle.outputs()[0] for handle in self.handles)
        total = _summed(indices.t(), rows, gradient.shape)
        values = total.values()
        if group.settings.op == AVERAGE:
            values = _scaled(values, share).div(ranks)
        values = _scaled(values, group.postscale).to(gradient.dtype)
        with torch.no_grad():
            gradient.copy_(coo(total.indices(), values, gradient.shape, coalesced=True))


def complete(reductions: list[SparseReduction], share: float, ranks: int) -> Meeting[None]:
    """Wait for the reductions and write their results."""
    yield from _wait(handle for reduction in reductions for handle in reduction.handles)
    for reduction in reductions:
        reduction.write(share, ranks)


def _wait(handles: Iterable[_C.Handle]) -> Meeting[None]:
    """Wait for all; then the first failure is raised."""
    failure: HorovodInternalError | None = None
    for handle in handles:
        yield handle
        try:
            handle.wait()
        except HorovodInternalError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _summed(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """The coalesced COO tensor of these entries; narrow floats as float32, to be rounded once."""
    if values.is_floating_point() and values.itemsize < 4:
        values = values.float()
    return coo(indices, values, shape).coalesce()


def _scaled(values: Tensor, factor: float) -> Tensor:
    return values if factor == 1.0 else values * factor
