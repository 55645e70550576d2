"""Tensors in every layout are taken by their logical values, whatever the other ranks' layout."""

import pytest
import torch
from support.checks import same

import hvdtorch as hvd


def base() -> torch.Tensor:
    return torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)


def laid_out(kind: int) -> torch.Tensor:
    """The values of `base()` in one of several memory layouts."""
    values = base()
    if kind == 0:
        return values.clone()
    if kind == 1:
        return values.to(memory_format=torch.channels_last)
    if kind == 2:
        return values.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    if kind == 3:  # every second element of a larger storage
        return torch.zeros(2, 3, 4, 10)[..., ::2].copy_(values)
    buffer = torch.full((1000,), -1.0)  # contiguous, at an offset
    return buffer[17 : 17 + values.numel()].view_as(values).copy_(values)


def every_layout(shift: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    kind = (rank + shift) % 5
    total = base() * size
    reduced = hvd.allreduce(laid_out(kind), op=hvd.Sum)
    same(reduced, total)
    assert reduced.is_contiguous()
    in_place = laid_out(kind)
    strides = in_place.stride()
    assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
    same(in_place, total)
    assert in_place.stride() == strides
    gathered = hvd.allgather(laid_out(kind))
    same(gathered, torch.cat([base()] * size))
    assert gathered.is_contiguous()
    root = size - 1
    received = laid_out(kind) if rank == root else laid_out(kind).mul_(0)
    assert hvd.broadcast_(received, root) is received
    same(received, base())
    group = [laid_out((kind + i) % 5) for i in range(5)]
    for member in hvd.grouped_allreduce(group, op=hvd.Sum):
        same(member, total)
    for member in hvd.grouped_allreduce_(group, op=hvd.Sum):
        same(member, total)


@pytest.mark.parametrize("shift", range(5))
def test_every_layout_against_every_other(cluster, shift):
    cluster.run(every_layout, shift)


def only_the_slice_changes() -> None:
    size = hvd.size()
    buffer = torch.arange(10.0)
    hvd.allreduce_(buffer[3:6], op=hvd.Sum)
    wanted = torch.arange(10.0)
    wanted[3:6] *= size
    same(buffer, wanted)
    matrix = torch.ones(4, 4)
    hvd.allreduce_(matrix[:, 1], op=hvd.Sum)
    wanted = torch.ones(4, 4)
    wanted[:, 1] = size
    same(matrix, wanted)
    hvd.allreduce_(matrix.t()[2:, :2], op=hvd.Sum)
    wanted[:2, 2:] *= size
    same(matrix, wanted)


def test_in_place_on_a_slice_leaves_its_surroundings_alone(cluster):
    cluster.run(only_the_slice_changes)


def expanded() -> None:
    rank, size = hvd.rank(), hvd.size()
    wide = torch.tensor([1.0 + rank]).expand(3, 4)
    same(hvd.allreduce(wide, op=hvd.Max), torch.full((3, 4), float(size)))
    same(hvd.allgather(wide)[-1], torch.full((4,), float(size)))
    same(hvd.broadcast(wide, 0), torch.ones(3, 4))
    for in_place in (hvd.allreduce_, hvd.allreduce_async_, lambda t: hvd.broadcast_(t, 0)):
        with pytest.raises(ValueError, match="share memory"):
            in_place(wide)
    with pytest.raises(ValueError, match="share memory"):
        hvd.grouped_allreduce_([torch.ones(2), wide])


def test_expanded_tensors_are_read_but_not_written(cluster):
    cluster.run(expanded)


def zero_dim_and_empty() -> None:
    rank, size = hvd.rank(), hvd.size()
    scalar = torch.tensor(float(rank))
    same(hvd.allreduce(scalar, op=hvd.Sum), torch.tensor(size * (size - 1) / 2))
    same(hvd.broadcast(scalar, size - 1), torch.tensor(size - 1.0))
    same(hvd.allreduce_(torch.tensor(rank), op=hvd.Max), torch.tensor(size - 1))
    for shape in ((0,), (3, 0), (0, 4, 5)):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            nothing = torch.empty(shape, dtype=dtype)
            same(hvd.allreduce(nothing), nothing)
            assert hvd.allreduce_(nothing) is nothing
            same(hvd.broadcast(nothing, 0), nothing)
            wanted = torch.empty((shape[0] * size, *shape[1:]), dtype=dtype)
            same(hvd.allgather(nothing), wanted)
    odd = torch.empty(3).as_strided((0, 3), (0, 0))  # no elements share memory: there are none
    assert hvd.allreduce_(odd) is odd
    some = torch.full((rank % 2, 3), float(rank))
    same(hvd.allgather(some), torch.cat([torch.full((r % 2, 3), float(r)) for r in range(size)]))


def test_zero_dim_and_empty_tensors(cluster):
    cluster.run(zero_dim_and_empty)


def lazy_views() -> None:
    size = hvd.size()
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    same(hvd.allreduce(numbers.conj(), op=hvd.Sum), torch.tensor([1 - 2j, 3 + 4j]) * size)
    same(hvd.allgather(numbers.conj().imag), torch.tensor([-2.0, 4.0]).repeat(size))
    view = numbers.conj()
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    same(view, torch.tensor([1 - 2j, 3 + 4j]) * size)
    same(numbers, torch.tensor([1 + 2j, 3 - 4j]) * size)


def test_conjugated_and_negated_views(cluster):
    cluster.run(lazy_views)


def autograd_is_unaware() -> None:
    leaf = torch.nn.Parameter(torch.ones(3))
    version = leaf._version
    assert hvd.allreduce_(leaf, op=hvd.Sum) is leaf
    assert hvd.broadcast_(leaf, 0) is leaf
    assert hvd.synchronize(hvd.allreduce_async_(leaf, op=hvd.Sum)) is leaf
    assert hvd.grouped_allreduce_([leaf])[0] is leaf
    assert leaf.is_leaf and leaf.requires_grad and leaf.grad_fn is None
    assert leaf._version == version
    same(leaf, torch.full((3,), float(hvd.size() ** 2)))
    for handle in (
        hvd.allreduce_async(leaf),
        hvd.allgather_async(leaf),
        hvd.broadcast_async(leaf, 0),
    ):
        assert not hvd.synchronize(handle).requires_grad


def test_in_place_and_async_forms_do_not_touch_autograd(cluster):
    cluster.run(autograd_is_unaware)
