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
    reduce_op,
    tensor_group,
)
from .compression import Compression, Compressor
from .operation import ADASUM, ALLREDUCE, AVERAGE, REDUCESCATTER, Handle, Operation
from .process_sets import ProcessSet, global_process_set

# ----------------------------------------------------------------------------------------------
# allreduce


def _allreduce(
    op: int,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    grouped: bool = False,
    in_place: bool = False,
) -> Operation:
    return Operation(
        kind=ALLREDUCE,
        label="grouped_allreduce" if grouped else "allreduce",
        process_set=process_set,
        name=name,
        in_place=in_place,
        reduce_op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
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
        reduce_op(op, average), name, prescale_factor, postscale_factor, process_set
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
        reduce_op(op, average), name, prescale_factor, postscale_factor, process_set
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
        reduce_op(op, average), name, prescale_factor, postscale_factor, process_set, in_place=True
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
        reduce_op(op, average), name, prescale_factor, postscale_factor, process_set, in_place=True
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
        reduce_op(op, average), name, prescale_factor, postscale_factor, process_set, grouped=True
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
        reduce_op(op, average), name, prescale_factor, postscale_factor, process_set, grouped=True
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
        reduce_op(op, average),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
        in_place=True,
    )
    return tuple(operation.run_detached(tensor_group(tensors, "grouped_allreduce_")))


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
        reduce_op(op, average),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
        in_place=True,
    ).submit(tensor_group(tensors, "grouped_allreduce_async_"))


# ----------------------------------------------------------------------------------------------
# reducescatter


def _reducescatter(
    tensors: Sequence[Tensor],
    op: int,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    label: str,
) -> Operation:
    for tensor in tensors:
        check_rows(tensor, label)
    return Operation(
        kind=REDUCESCATTER,
        label=label,
        process_set=process_set,
        name=name,
        reduce_op=checked_op(op, label, refused=(ADASUM,)),
        prescale=prescale_factor,
        postscale=postscale_factor,
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
    operation = _reducescatter(
        [tensor], op, name, prescale_factor, postscale_factor, process_set, "reducescatter"
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
    return _reducescatter(
        [tensor], op, name, prescale_factor, postscale_factor, process_set, "reducescatter"
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
    group = tensor_group(tensors, "grouped_reducescatter")
    operation = _reducescatter(
        group, op, name, prescale_factor, postscale_factor, process_set, "grouped_reducescatter"
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
    group = tensor_group(tensors, "grouped_reducescatter_async")
    return _reducescatter(
        group, op, name, prescale_factor, postscale_factor, process_set, "grouped_reducescatter"
    ).submit(group)
