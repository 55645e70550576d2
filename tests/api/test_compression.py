"""Compression: what travels in place of a tensor, in every function that takes `compression=`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import COMPLEX, FLOATS, INTEGERS, same, values
from torch import Tensor

import hvdtorch as hvd
from hvdtorch.compression import Compressor

WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}


# --- the compressors themselves ----------------------------------------------------------------


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_travel_in_16_bits_and_come_back(name: str, dtype: torch.dtype) -> None:
    compression = getattr(hvd.Compression, name)
    given = values([1.0, -2.5, 3 + 2**-10], dtype)
    sent, context = compression.compress(given)
    same(sent, given.to(WIRES[name]))
    same(compression.decompress(sent, context), given.to(WIRES[name]).to(dtype))


@pytest.mark.parametrize("dtype", (torch.bool, *INTEGERS, *COMPLEX), ids=str)
def test_what_is_no_float_is_left_alone(dtype: torch.dtype) -> None:
    given = torch.ones(3, dtype=dtype)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        sent, context = compression.compress(given)
        assert sent is given
        assert compression.decompress(sent, context) is given


def test_none_is_the_identity_for_floats() -> None:
    given = torch.ones(3, dtype=torch.float64)
    sent, context = hvd.Compression.none.compress(given)
    assert sent is given and hvd.Compression.none.decompress(sent, context) is given


def test_the_interface_itself_compresses_nothing() -> None:
    with pytest.raises(NotImplementedError):
        Compressor.compress(torch.ones(1))
    with pytest.raises(NotImplementedError):
        Compressor.decompress(torch.ones(1), None)


# --- in the collectives ------------------------------------------------------------------------


def reduced_in_every_way(tensor: Tensor, **options: Any) -> list[Tensor]:
    """`tensor`, the same on all ranks and as long as there are ranks, through all four functions.

    The reducescatters give one element, the others all.
    """
    return [
        hvd.allreduce(tensor, **options),
        *hvd.grouped_allreduce([tensor, tensor], **options),
        hvd.reducescatter(tensor, **options),
        *hvd.grouped_reducescatter([tensor, tensor], **options),
    ]


def narrowed() -> None:
    size = hvd.size()
    for name, wire in WIRES.items():
        compression = getattr(hvd.Compression, name)
        for dtype in FLOATS:
            fine = torch.full((size,), 1 + 2**-12, dtype=dtype)  # more bits than the wire has
            wanted = fine.to(wire).to(dtype)
            for op in (hvd.Average, hvd.Max):
                for result in reduced_in_every_way(fine, op=op, compression=compression):
                    same(result, wanted[: result.numel()])
                for result in reduced_in_every_way(fine, op=op):
                    same(result, fine[: result.numel()])
        whole = torch.full((size,), 2**60 + 1)  # an integer that no 16-bit float holds
        for result in reduced_in_every_way(whole, op=hvd.Max, compression=compression):
            same(result, whole[: result.numel()])


def test_floats_are_narrowed_on_the_wire_and_integers_are_not(cluster) -> None:
    cluster.run(narrowed)


def mixed_group() -> None:
    group = [torch.full((2,), 1 + 2**-12), torch.tensor([2**60 + 1]), torch.tensor([True])]
    one, two, three = hvd.grouped_allreduce(group, op=hvd.Max, compression=hvd.Compression.fp16)
    same(one, torch.ones(2))
    same(two, group[1])
    same(three, group[2])


def test_a_group_of_several_dtypes(cluster) -> None:
    cluster.run(mixed_group)


def summed_in_float32() -> None:
    # In float16 the sum of 2048 and three times 1 stays 2048, if rounded after every rank.
    value = torch.tensor([2048.0 if hvd.rank() == 0 else 1.0])
    same(hvd.allreduce(value, op=hvd.Sum, compression=hvd.Compression.fp16), torch.tensor([2052.0]))


@pytest.mark.np(4)
def test_sums_are_rounded_once(cluster) -> None:
    cluster.run(summed_in_float32)  # 2051 lies between the float16 values 2050 and 2052


# --- a user's own ------------------------------------------------------------------------------


class Doubling:
    """Neither of hvdtorch's classes nor the same values: what travels is twice the tensor."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor * 2, ("any", "context")

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        assert ctx == ("any", "context")
        return tensor + 1


class Subclass(Compressor):
    """The way Horovod's documentation names."""

    compress = staticmethod(Doubling.compress)
    decompress = staticmethod(Doubling.decompress)


class WithState:
    """An object whose methods are bound to it."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.contexts = 0

    def compress(self, tensor: Tensor) -> tuple[Tensor, int]:
        self.contexts += 1
        return tensor * self.factor, self.contexts

    def decompress(self, tensor: Tensor, ctx: int) -> Tensor:
        assert 1 <= ctx <= self.contexts
        return tensor + 1


OWN: dict[str, Callable[[], Any]] = {
    "class": lambda: Doubling,
    "object": Doubling,
    "subclass": lambda: Subclass,
    "with state": lambda: WithState(2.0),
}


def own(kind: str) -> None:
    given = torch.full((hvd.size(),), 3.0)
    for result in reduced_in_every_way(given, compression=OWN[kind]()):
        same(result, torch.full((result.numel(),), 7.0))


@pytest.mark.parametrize("kind", OWN)
def test_a_users_own_in_every_collective(cluster, kind: str) -> None:
    cluster.run(own, kind)


def optimized(kind: str) -> float:
    w = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([w], lr=1.0), [("w", w)], compression=OWN[kind]()
    )
    (w * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    return -w.item()


@pytest.mark.np(2)
@pytest.mark.parametrize("kind", OWN)
def test_a_users_own_in_the_optimizer(cluster, kind: str) -> None:
    assert cluster.run(optimized, kind) == [1.5 * 2 + 1] * 2


def optimized_dtypes(name: str) -> None:
    for dtype in FLOATS:
        w = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([w], lr=1.0),
            [(f"w.{dtype}", w)],
            compression=getattr(hvd.Compression, name),
        )
        factors = torch.tensor([1 + 2**-12, 2.0], dtype=torch.float64).to(dtype)
        (w * factors).sum().backward()
        same(w.grad, factors.to(WIRES[name]).to(dtype))
        optimizer.step()
        same(w.detach(), -w.grad)


@pytest.mark.np(2)
@pytest.mark.parametrize("name", WIRES)
def test_gradients_of_every_float_dtype(cluster, name: str) -> None:
    cluster.run(optimized_dtypes, name)


def refused() -> None:
    for compression in ("fp16", None, torch.float16):
        for call in (
            lambda c: hvd.allreduce(torch.ones(2), compression=c),
            lambda c: hvd.grouped_allreduce([torch.ones(2)], compression=c),
            lambda c: hvd.reducescatter(torch.ones(2), compression=c),
            lambda c: hvd.grouped_reducescatter([torch.ones(2)], compression=c),
        ):
            with pytest.raises(TypeError, match="no methods compress and decompress"):
                call(compression)


def test_what_is_no_compressor_is_refused(cluster) -> None:
    cluster.run(refused)
