"""Reduction of sparse tensors: every rank gets all entries of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .collective_arguments import checked_op
from .exceptions import HorovodInternalError
from .exchanges import allgather_async
from .operation import AVERAGE, SUM, Handle, check_member, synchronize
from .process_sets import ProcessSet, global_process_set
from .reductions import allreduce_async


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the reduction of a sparse (COO) tensor, coalesced or not.

    Its shape and dtype must be the same on all ranks; the number of entries may differ and be 0.

    Returns a function, not a handle: called without arguments, once, it waits and returns an
    uncoalesced COO tensor with the entries of all ranks, whose duplicates are to be summed. For
    `op=Average` they are divided by the number of ranks (integers become floats); every other op
    means their sum. The result never requires grad.

    The entries travel as the allgathers `<name>.indices` and `<name>.values`.

    Raises NotImplementedError for a dense tensor, TypeError for a name that is no str. The
    function returned raises HorovodInternalError, on all ranks, if the ranks disagree on shape,
    dtype or op.
    """
    what = "sparse_allreduce_async"
    if not isinstance(name, str) or not name:
        raise TypeError(f"{what}: name must be a str that is not empty, not {name!r}")
    check_member(process_set, what)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.sparse_coo:
        raise NotImplementedError(
            f"{what} takes sparse COO tensors, not a {tensor.layout} one: use allreduce_async for "
            "dense tensors, to_sparse() for other sparse layouts"
        )
    average = checked_op(op, what) == AVERAGE
    own = tensor.detach()
    # What the allgathers cannot see themselves: that all ranks mean the same shape and op.
    statement = torch.tensor([[process_set.rank(), own.sparse_dim(), *own.shape]])
    one = torch.ones(1, dtype=torch.float64)
    handles = [
        allgather_async(statement, f"{name}.statement", process_set),
        allreduce_async(
            one, name=f"{name}.share", op=AVERAGE if average else SUM, process_set=process_set
        ),
        allgather_async(own._indices().t().contiguous(), f"{name}.indices", process_set),
        allgather_async(own._values(), f"{name}.values", process_set),
    ]

    def finish() -> Tensor:
        statements, share, indices, values = _all_results(handles)
        _check_agreement(name, statements.tolist())
        if average:
            # The average of ones says what an average divides by when some ranks have joined.
            values = values / round(len(statements) / share.item())
        return torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=False)

    return finish


def _all_results(handles: list[Handle]) -> list[Tensor]:
    """The results, when all are complete: after a failure, too, the names are then free again."""
    failures: list[HorovodInternalError] = []
    results: list[Tensor] = []
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except HorovodInternalError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return results


def _check_agreement(name: str, statements: list[list[int]]) -> None:
    said = {rank: statement for rank, *statement in statements}
    if all(statement == statements[0][1:] for statement in said.values()):
        return
    texts = [
        f"rank {rank}: shape {shape} ({sparse_dim} of its dims sparse)"
        for rank, (sparse_dim, *shape) in said.items()
    ]
    raise HorovodInternalError(
        f"sparse_allreduce_async.{name}: the ranks disagree on shape: {'; '.join(texts)}. All "
        "ranks must pass tensors of one shape."
    )
