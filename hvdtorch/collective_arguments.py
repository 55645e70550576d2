"""Arguments that several collectives share, checked and converted before anything is submitted."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .compression import Compressor
from .exceptions import HorovodInternalError
from .operation import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, check_member, check_tensor
from .process_sets import ProcessSet

_OPS = {AVERAGE: "Average", SUM: "Sum", ADASUM: "Adasum", MIN: "Min", MAX: "Max"}
_OPS[PRODUCT] = "Product"
_MOST_ROWS = 2**31 - 1  # to one rank: received_splits are int32


def reduce_op(op: int | None, average: bool | None, what: str = "allreduce") -> int:
    """The op of an allreduce from its two arguments.

    Call it from the public function itself: the deprecation warning points at that function's
    caller.
    """
    if average is None:
        return AVERAGE if op is None else checked_op(op, what)
    if op is not None:
        raise ValueError(f"{what}: give either op or average, not both; average is deprecated")
    warnings.warn(
        "average= is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3
    )
    return AVERAGE if average else SUM


def checked_op(op: int, what: str, refused: Sequence[int] = ()) -> int:
    """`op`, if it is one of the ops and not `refused`."""
    if isinstance(op, int) and op in _OPS and op not in refused:
        return op
    legal = ", ".join(name for value, name in _OPS.items() if value not in refused)
    if not isinstance(op, int):
        raise TypeError(f"{what}: op must be one of hvd.{legal}, not {op!r}")
    raise HorovodInternalError(f"{what}: op={_OPS.get(op, op)} is none of hvd.{legal}")


def factor(value: object, argument: str, what: str) -> float:
    """A prescale or postscale factor: whatever `float()` takes, but texts."""
    if type(value) is float:
        return value
    try:
        if not isinstance(value, str | bytes | bytearray):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise TypeError(f"{what}: {argument} must be a real number, not {value!r}")


def tensor_group(
    tensors: Iterable[Tensor], what: str, in_place: bool = False, rows: bool = False
) -> list[Tensor]:
    """The members of a group, at least one; `rows`: all must have rows."""
    if isinstance(tensors, Tensor):
        raise TypeError(f"{what} takes a list of tensors, not one tensor")
    if not isinstance(tensors, Iterable):
        raise TypeError(f"{what}: tensors must be a list of tensors, not {tensors!r}")
    group = list(tensors)
    if not group:
        raise ValueError(f"{what}: the list of tensors is empty")
    for index, tensor in enumerate(group):
        member = f"{what}: tensors[{index}]"
        if rows:
            check_rows(tensor, member)
        else:
            check_tensor(tensor, member, in_place)
    return group


def check_rows(tensor: Tensor, what: str) -> None:
    """Raise unless the tensor has rows, for the collectives that join or split them."""
    check_tensor(tensor, what, in_place=False)
    if tensor.dim() == 0:
        raise ValueError(f"{what}: a 0-dim tensor has no rows (dim 0): reshape it to [1]")


def rank_of_root(root_rank: object, process_set: ProcessSet, what: str) -> int:
    """The rank within the set of a root, which is given by its global rank."""
    check_member(process_set, what)
    try:
        root = operator.index(root_rank)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{what}: root_rank must be a global rank as an int, not {root_rank!r}"
        ) from None
    members = process_set.ranks or []
    if root not in members:
        raise ValueError(
            f"{what}: root_rank {root} is not a member of {process_set}; pass a global rank that is"
        )
    return members.index(root)


def split_counts(
    splits: Iterable[int] | Tensor | None, tensor: Tensor, process_set: ProcessSet
) -> list[int]:
    """alltoall: how many rows of `tensor` go to each rank of the set.

    The core checks their number and their sum.
    """
    counts = [] if splits is None else _integers(splits)
    if counts:
        for index, count in enumerate(counts):
            if count < 0:
                raise ValueError(
                    f"alltoall: splits[{index}] is negative: {count}; send each rank 0 rows or more"
                )
        if max(counts) > _MOST_ROWS:
            raise ValueError(f"alltoall: splits has an entry above {_MOST_ROWS}: send less at once")
        return counts
    rows, ranks = tensor.shape[0], process_set.size() or 1
    if rows % ranks != 0:
        raise ValueError(
            f"alltoall without splits cuts dim 0 into equal parts, and {rows} rows cannot be cut "
            f"into {ranks}; pass splits"
        )
    return [rows // ranks] * ranks


def _integers(splits: Iterable[int] | Tensor) -> list[int]:
    values = splits.tolist() if hasattr(splits, "tolist") else splits  # tensors and numpy arrays
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise ValueError(
            f"alltoall: splits must be one row of integers, one per rank, not {splits!r}"
        ) from None


def device_of(splits: object) -> torch.device:
    """Where the received splits are wanted: with the splits."""
    return splits.device if isinstance(splits, Tensor) else torch.device("cpu")


def check_compressor(compression: object, what: str) -> None:
    """Raise TypeError unless it has the methods of one."""
    if not all(callable(getattr(compression, m, None)) for m in ("compress", "decompress")):
        raise TypeError(
            f"{what}: compression={compression!r} has no methods compress and decompress; pass a "
            "member of hvd.Compression, or an object with the two"
        )


def compressed(
    tensors: Sequence[Tensor], compression: type[Compressor], what: str
) -> tuple[list[Tensor], list[Any]]:
    """What travels in place of `tensors`, and what `decompressed` needs to know."""
    check_compressor(compression, what)
    for tensor in tensors:
        check_tensor(tensor, what, in_place=False)
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [context for _, context in pairs]


def decompressed(
    tensors: Sequence[Tensor], contexts: Sequence[Any], compression: type[Compressor]
) -> list[Tensor]:
    """The results as the caller of `compressed` wants them."""
    return [
        compression.decompress(t, context) for t, context in zip(tensors, contexts, strict=True)
    ]
