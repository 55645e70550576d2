"""The collectives that compute: allreduce and reducescatter, alone and grouped.

What holds for all collectives is said in collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .collective_arguments import (
    check_rows,
    checked_op,
    compressed,
    decompressed,
    factor,
    reduce_op,
    tensor_group,
)
from .compression import Compression, Compressor
from .operation import ADASUM, ALLREDUCE, AVERAGE, REDUCESCATTER, Handle, Operation
from .process_sets import ProcessSet, global_process_set

# ----------------------------------------------------------------------------------------------
# allreduce


def _allreduce(
    function: str,
    op: int,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Operation:
    return Operation(
        kind=ALLREDUCE,
        label="grouped_allreduce" if function.startswith("grouped_") else "allreduce",
        process_set=process_set,
        function=function,
        name=name,
        in_place=function.endswith("_"),
        reduce_op=op,
        prescale=factor(prescale_factor, "prescale_factor", function),
        postscale=factor(postscale_factor, "postscale_factor", function),
    )


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor element by element over the ranks; every rank gets the same bits.

    Shape and dtype must be the same on all ranks. The gradient of the input is the same allreduce
    of the incoming gradient.
    """
    operation = _allreduce(
        "allreduce",
        reduce_op(op, average, "allreduce"),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    sent, contexts = compressed([tensor], compression, "allreduce")
    return decompressed(operation.run(sent), contexts, compression)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce`; `synchronize` returns a new tensor, which never requires grad."""
    return _allreduce(
        "allreduce_async",
        reduce_op(op, average, "allreduce_async"),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    ).submit([tensor])


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce` into the tensor itself, which is returned. Unseen by autograd."""
    return _allreduce(
        "allreduce_",
        reduce_op(op, average, "allreduce_"),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    ).run_detached([tensor])[0]


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce_`; `synchronize` returns the tensor given."""
    return _allreduce(
        "allreduce_async_",
        reduce_op(op, average, "allreduce_async_"),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    ).submit([tensor])


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors as one operation; their shapes and dtypes may differ.

    The lists of all ranks must agree in length and order. Returns a list in input order.
    """
    group = tensor_group(tensors, "grouped_allreduce")
    operation = _allreduce(
        "grouped_allreduce",
        reduce_op(op, average, "grouped_allreduce"),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    sent, contexts = compressed(group, compression, "grouped_allreduce")
    return decompressed(operation.run(sent), contexts, compression)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce`; `synchronize` returns a tuple of new tensors."""
    return _allreduce(
        "grouped_allreduce_async",
        reduce_op(op, average, "grouped_allreduce_async"),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    ).submit(tensor_group(tensors, "grouped_allreduce_async"))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """`grouped_allreduce` into the tensors themselves, which are returned as a tuple."""
    operation = _allreduce(
        "grouped_allreduce_",
        reduce_op(op, average, "grouped_allreduce_"),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return tuple(operation.run_detached(tensor_group(tensors, "grouped_allreduce_", in_place=True)))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce_`; `synchronize` returns a tuple of the tensors given."""
    return _allreduce(
        "grouped_allreduce_async_",
        reduce_op(op, average, "grouped_allreduce_async_"),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    ).submit(tensor_group(tensors, "grouped_allreduce_async_", in_place=True))


# ----------------------------------------------------------------------------------------------
# reducescatter


def _reducescatter(
    function: str,
    op: int,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Operation:
    return Operation(
        kind=REDUCESCATTER,
        label="grouped_reducescatter" if function.startswith("grouped_") else "reducescatter",
        process_set=process_set,
        function=function,
        name=name,
        reduce_op=checked_op(op, function, refused=(ADASUM,)),
        prescale=factor(prescale_factor, "prescale_factor", function),
        postscale=factor(postscale_factor, "postscale_factor", function),
    )


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over the ranks, and keep this rank's share of the rows (dim 0).

    Of d rows on P ranks, rank r keeps d // P consecutive ones, and one more if r < d % P; with
    fewer rows than ranks the last ranks get none. Shape and dtype must be the same on all ranks.
    All ops but Adasum.

    The gradient of the input is the allgather of the incoming gradients, times prescale_factor and
    postscale_factor, and times P for Sum (for every other op times 1, which is Horovod's rule for
    Average and not the derivative of Min, Max or Product).

    Raises ValueError for a 0-dim tensor, HorovodInternalError for an op it does not have.
    """
    check_rows(tensor, "reducescatter")
    operation = _reducescatter(
        "reducescatter", op, name, prescale_factor, postscale_factor, process_set
    )
    sent, contexts = compressed([tensor], compression, "reducescatter")
    return decompressed(operation.run(sent), contexts, compression)[0]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`; `synchronize` returns a new tensor, which never requires grad."""
    check_rows(tensor, "reducescatter_async")
    return _reducescatter(
        "reducescatter_async", op, name, prescale_factor, postscale_factor, process_set
    ).submit([tensor])


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as one operation; their shapes and dtypes may differ.

    The lists of all ranks must agree in length and order. Returns a list in input order.
    """
    group = tensor_group(tensors, "grouped_reducescatter", rows=True)
    operation = _reducescatter(
        "grouped_reducescatter", op, name, prescale_factor, postscale_factor, process_set
    )
    sent, contexts = compressed(group, compression, "grouped_reducescatter")
    return decompressed(operation.run(sent), contexts, compression)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `grouped_reducescatter`; `synchronize` returns a tuple of new tensors."""
    group = tensor_group(tensors, "grouped_reducescatter_async", rows=True)
    return _reducescatter(
        "grouped_reducescatter_async", op, name, prescale_factor, postscale_factor, process_set
    ).submit(group)
