"""The collectives that move values as they are: allgather, broadcast, alltoall; and barrier.

What holds for all collectives is said in collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from .collective_arguments import check_rows, device_of, rank_of_root, split_counts, tensor_group
from .operation import (
    ALLGATHER,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    Handle,
    Operation,
    check_member,
)
from .process_sets import ProcessSet, global_process_set

# ----------------------------------------------------------------------------------------------
# allgather


def _allgather(function: str, name: str | None, process_set: ProcessSet) -> Operation:
    label = function.removesuffix("_async")
    return Operation(
        kind=ALLGATHER, label=label, process_set=process_set, function=function, name=name
    )


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenate the ranks' tensors along dim 0, in rank order.

    The number of rows may differ between ranks and be 0; the other dims and the dtype must agree.
    The gradient of the input is its rows of the incoming gradient averaged over the ranks. Raises
    ValueError for a 0-dim tensor.
    """
    check_rows(tensor, "allgather")
    return _allgather("allgather", name, process_set).run([tensor])[0]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather`."""
    check_rows(tensor, "allgather_async")
    return _allgather("allgather_async", name, process_set).submit([tensor])


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """`allgather` of several tensors as one operation; a tuple in input order."""
    group = tensor_group(tensors, "grouped_allgather", rows=True)
    return tuple(_allgather("grouped_allgather", name, process_set).run(group))


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allgather`; `synchronize` returns a tuple."""
    group = tensor_group(tensors, "grouped_allgather_async", rows=True)
    return _allgather("grouped_allgather_async", name, process_set).submit(group)


# ----------------------------------------------------------------------------------------------
# broadcast


def _broadcast(
    function: str, root_rank: int, name: str | None, process_set: ProcessSet
) -> Operation:
    return Operation(
        kind=BROADCAST,
        label="broadcast",
        process_set=process_set,
        function=function,
        name=name,
        in_place=function.endswith("_"),
        root=rank_of_root(root_rank, process_set, function),
    )


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """A copy of the tensor of `root_rank` (a global rank) on every rank.

    Shape, dtype and root must be the same on all ranks. The gradient of the input is the average of
    the incoming gradients on the root and zeros elsewhere. Raises ValueError if the root is not a
    member of the process set, TypeError if it is not an integer.
    """
    return _broadcast("broadcast", root_rank, name, process_set).run([tensor])[0]


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast`."""
    return _broadcast("broadcast_async", root_rank, name, process_set).submit([tensor])


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`broadcast` into the tensor itself, which is returned."""
    return _broadcast("broadcast_", root_rank, name, process_set).run_detached([tensor])[0]


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast_`; `synchronize` returns the tensor given."""
    return _broadcast("broadcast_async_", root_rank, name, process_set).submit([tensor])


# ----------------------------------------------------------------------------------------------
# alltoall


def _alltoall(
    function: str,
    tensor: Tensor,
    splits: Iterable[int] | Tensor | None,
    name: str | None,
    process_set: ProcessSet,
) -> Operation:
    check_member(process_set, function)
    check_rows(tensor, function)
    return Operation(
        kind=ALLTOALL,
        label="alltoall",
        process_set=process_set,
        function=function,
        name=name,
        splits=split_counts(splits, tensor, process_set),
        splits_device=device_of(splits),
    )


def alltoall(
    tensor: Tensor,
    splits: Iterable[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows (dim 0) of a tensor to every rank, and receive theirs, in rank order.

    splits
        How many rows go to each rank of the set, from the first row on: integers in a list, tuple,
        numpy array or tensor. Rows beyond their sum are not sent. Without it, or with an empty one,
        the rows are cut into equal parts.

    The number of rows and the splits may differ between ranks; the other dims and the dtype must
    agree. Returns the received rows; if `splits` is given, also a 1-D int32 tensor, on the device
    of `splits`, of how many rows came from each rank.

    The gradient of the input is the alltoall of the incoming gradient back to where its rows came
    from, and zeros for rows that were not sent.

    Raises ValueError for a 0-dim tensor, for rows that cannot be cut into equal parts, and for
    splits that are not one integer >= 0 per rank or add up to more than there are rows.
    """
    output, received = _alltoall("alltoall", tensor, splits, name, process_set).run([tensor])
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor,
    splits: Iterable[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `alltoall`; `synchronize` returns rows and received splits, also without `splits`."""
    return _alltoall("alltoall_async", tensor, splits, name, process_set).submit([tensor])


# ----------------------------------------------------------------------------------------------
# barrier


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it.

    At most one can be in flight per set and rank. It does not wait for asynchronous operations.
    """
    Operation(kind=BARRIER, label="barrier", process_set=process_set, name="noname").run_detached(
        []
    )
