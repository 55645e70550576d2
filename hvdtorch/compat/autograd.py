"""The differentiable collectives as classes with an `apply`, as third-party code calls them.

`Horovod<Kind>.apply` does what the blocking function does that returns a new tensor, and is
differentiable like it. It takes that function's arguments, in its order, all of them by position;
`compression` is left out. In the grouped forms the tensors come last, one argument each:

    HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    HorovodGroupedAllgather.apply(name, process_set, *tensors)

hvdtorch has one autograd function for all kinds (operation.py); these are names for its uses.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hvdtorch import collective_arguments, collectives
from hvdtorch.process_sets import ProcessSet


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The op that the arguments `op` and `average` of an allreduce stand for.

    Neither is Average. Raises ValueError if both are given; `average` alone is deprecated.
    """
    return collective_arguments.reduce_op(op, average)


class HorovodAllreduce:
    """`allreduce`."""

    @staticmethod
    def apply(
        tensor: Tensor,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> Tensor:
        return collectives.allreduce(
            tensor,
            average=average,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )


class HorovodGroupedAllreduce:
    """`grouped_allreduce`; `apply` returns a tuple."""

    @staticmethod
    def apply(
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        return tuple(
            collectives.grouped_allreduce(
                tensors,
                average=average,
                name=name,
                op=op,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                process_set=process_set,
            )
        )


class HorovodAllgather:
    """`allgather`."""

    @staticmethod
    def apply(tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        return collectives.allgather(tensor, name, process_set)


class HorovodGroupedAllgather:
    """`grouped_allgather`."""

    @staticmethod
    def apply(name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        return collectives.grouped_allgather(tensors, name, process_set)


class HorovodBroadcast:
    """`broadcast`."""

    @staticmethod
    def apply(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        return collectives.broadcast(tensor, root_rank, name, process_set)


class HorovodAlltoall:
    """`alltoall`: with splits, the output and how many rows came from each rank."""

    @staticmethod
    def apply(tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        return collectives.alltoall(tensor, splits, name, process_set)


class HorovodReducescatter:
    """`reducescatter`."""

    @staticmethod
    def apply(
        tensor: Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
    ) -> Tensor:
        return collectives.reducescatter(
            tensor,
            name=name,
            op=op,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )


class HorovodGroupedReducescatter:
    """`grouped_reducescatter`; `apply` returns a tuple."""

    @staticmethod
    def apply(
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        return tuple(
            collectives.grouped_reducescatter(
                tensors,
                name=name,
                op=op,
                process_set=process_set,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
            )
        )
