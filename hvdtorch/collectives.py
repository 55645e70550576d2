"""The collectives. Each function describes an operation; operation.py executes it.

What holds for all of them:

- An operation starts when every rank of the process set has submitted the same name, in any order
  and from any thread. Without a name, operations are numbered per process set and kind, so ranks
  must then submit them in the same order. A name in flight on this rank cannot be submitted again
  (ValueError).
- Blocking forms wait; `_async` forms return a `Handle` for `poll` and `synchronize`. Forms that end
  in `_` write into the tensor they are given and return it. The results of all others are new
  contiguous tensors of the input's dtype and device.
- Only blocking forms that return new tensors are differentiable.
- Any strided CPU tensor is taken by its logical values: transposed, channels_last, sliced or
  expanded (not expanded in the `_` forms).
- What a rank can see alone is a ValueError or TypeError at the call. A disagreement between ranks
  is the same `HorovodInternalError` on all of them, from `synchronize` or the blocking call, and
  the job stays usable. Before `hvd.init()` and after `hvd.shutdown()` every call is a
  `HorovodInternalError`.

Arguments that many of them share:

tensor
    What this rank contributes; in the grouped forms `tensors`, a list of them, submitted as one.
name
    Which operations of the ranks belong together; None or "" numbers it.
op
    `Average` (the default), `Sum`, `Min`, `Max` or `Product`. Integers average exactly, truncating
    toward zero; floats narrower than 32 bits are accumulated in float32 and rounded once. For bool,
    Sum and Max are "or", Product and Min are "and"; Average is refused.
average
    Deprecated: True is `op=Average`, False is `op=Sum`.
prescale_factor, postscale_factor
    What the values are multiplied by before and after the reduction; integers are truncated toward
    zero after each.
compression
    A class of `hvd.Compression`: the dtype floating point values travel in.
process_set
    The ranks that take part.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from .compression import Compression, Compressor
from .exceptions import HorovodInternalError
from .operation import (
    ADASUM,
    ALLGATHER,
    ALLREDUCE,
    AVERAGE,
    BARRIER,
    BROADCAST,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Handle,
    Operation,
    check_member,
    check_tensor,
    poll,
    synchronize,
)
from .process_sets import ProcessSet, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "poll",
    "synchronize",
]

Average, Sum, Adasum = AVERAGE, SUM, ADASUM
Min, Max, Product = MIN, MAX, PRODUCT


# ----------------------------------------------------------------------------------------------
# Arguments


def _reduce_op(op: int | None, average: bool | None) -> int:
    """The op of an allreduce from its two arguments. Call it from the public function itself: the
    deprecation warning points at that function's caller."""
    if average is None:
        return AVERAGE if op is None else _checked_op(op)
    if op is not None:
        raise ValueError("give either op or average, not both; average is deprecated")
    warnings.warn(
        "average= is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3
    )
    return AVERAGE if average else SUM


def _checked_op(op: int) -> int:
    if not isinstance(op, int):
        raise TypeError(f"op must be one of hvd.Average, Sum, Min, Max, Product, not {op!r}")
    if op == ADASUM:
        raise NotImplementedError("op=hvd.Adasum is not available yet; use hvd.Average or hvd.Sum")
    if op not in (AVERAGE, SUM, MIN, MAX, PRODUCT):
        raise HorovodInternalError(f"op={op} is none of hvd.Average, Sum, Min, Max, Product")
    return op


def _group(tensors: Iterable[Tensor], what: str) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        raise TypeError(f"{what} takes a list of tensors, not one tensor")
    group = list(tensors)
    if not group:
        raise ValueError(f"{what}: the list of tensors is empty")
    return group


def _compressed(
    tensors: Sequence[Tensor], compression: type[Compressor], what: str
) -> tuple[list[Tensor], list[Any]]:
    for tensor in tensors:
        check_tensor(tensor, what, in_place=False)
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [context for _, context in pairs]


def _decompressed(
    tensors: Sequence[Tensor], contexts: Sequence[Any], compression: type[Compressor]
) -> list[Tensor]:
    return [
        compression.decompress(t, context) for t, context in zip(tensors, contexts, strict=True)
    ]


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
        _reduce_op(op, average), name, prescale_factor, postscale_factor, process_set
    )
    sent, contexts = _compressed([tensor], compression, "allreduce")
    return _decompressed(operation.run(sent), contexts, compression)[0]


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
        _reduce_op(op, average), name, prescale_factor, postscale_factor, process_set
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
        _reduce_op(op, average), name, prescale_factor, postscale_factor, process_set, in_place=True
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
        _reduce_op(op, average), name, prescale_factor, postscale_factor, process_set, in_place=True
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
    group = _group(tensors, "grouped_allreduce")
    operation = _allreduce(
        _reduce_op(op, average), name, prescale_factor, postscale_factor, process_set, grouped=True
    )
    sent, contexts = _compressed(group, compression, "grouped_allreduce")
    return _decompressed(operation.run(sent), contexts, compression)


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
        _reduce_op(op, average), name, prescale_factor, postscale_factor, process_set, grouped=True
    ).submit(_group(tensors, "grouped_allreduce_async"))


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
        _reduce_op(op, average),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
        in_place=True,
    )
    return tuple(operation.run_detached(_group(tensors, "grouped_allreduce_")))


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
        _reduce_op(op, average),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
        in_place=True,
    ).submit(_group(tensors, "grouped_allreduce_async_"))


# ----------------------------------------------------------------------------------------------
# allgather


def _allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, label: str
) -> Operation:
    for tensor in tensors:
        check_tensor(tensor, label, in_place=False)
        if tensor.dim() == 0:
            raise ValueError(
                f"{label} joins tensors along dim 0, which a 0-dim tensor lacks; reshape it to [1]"
            )
    return Operation(kind=ALLGATHER, label=label, process_set=process_set, name=name)


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenate the ranks' tensors along dim 0, in rank order.

    The number of rows may differ between ranks and be 0; the other dims and the dtype must agree.
    The gradient of the input is its rows of the incoming gradient averaged over the ranks. Raises
    ValueError for a 0-dim tensor.
    """
    return _allgather([tensor], name, process_set, "allgather").run([tensor])[0]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather`."""
    return _allgather([tensor], name, process_set, "allgather").submit([tensor])


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """`allgather` of several tensors as one operation; a tuple in input order."""
    group = _group(tensors, "grouped_allgather")
    return tuple(_allgather(group, name, process_set, "grouped_allgather").run(group))


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allgather`; `synchronize` returns a tuple."""
    group = _group(tensors, "grouped_allgather_async")
    return _allgather(group, name, process_set, "grouped_allgather").submit(group)


# ----------------------------------------------------------------------------------------------
# broadcast


def _broadcast(
    root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool = False
) -> Operation:
    check_member(process_set, "broadcast")
    root = operator.index(root_rank)
    members = process_set.ranks or []
    if root not in members:
        raise ValueError(f"broadcast: root_rank {root} is not a member of {process_set}")
    return Operation(
        kind=BROADCAST,
        label="broadcast",
        process_set=process_set,
        name=name,
        in_place=in_place,
        root=members.index(root),
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
    return _broadcast(root_rank, name, process_set).run([tensor])[0]


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast`."""
    return _broadcast(root_rank, name, process_set).submit([tensor])


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`broadcast` into the tensor itself, which is returned."""
    return _broadcast(root_rank, name, process_set, in_place=True).run_detached([tensor])[0]


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast_`; `synchronize` returns the tensor given."""
    return _broadcast(root_rank, name, process_set, in_place=True).submit([tensor])


# ----------------------------------------------------------------------------------------------
# barrier


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it.

    At most one can be in flight per set and rank. It does not wait for asynchronous operations.
    """
    Operation(kind=BARRIER, label="barrier", process_set=process_set, name="noname").run_detached(
        []
    )
