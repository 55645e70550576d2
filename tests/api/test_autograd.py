"""Gradients through the blocking out-of-place collectives."""

import pytest
import torch
from support.checks import same

import hvdtorch as hvd


def input_gradient(function, x: torch.Tensor) -> torch.Tensor:
    """d/dx of sum over the outputs of (rank + 1) * sum(output)."""
    outputs = function(x)
    loss = sum((hvd.rank() + 1) * out.sum() for out in outputs)
    (gradient,) = torch.autograd.grad(loss, x)
    return gradient


def mean_factor() -> float:
    """The average over the ranks of (rank + 1)."""
    return (hvd.size() + 1) / 2


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64, requires_grad=True)


def allreduce_gradients() -> None:
    size = hvd.size()
    for shape in ((), (3,), (2, 0), (70_000,)):
        for op, factor in (
            (hvd.Average, mean_factor()),
            (hvd.Sum, mean_factor() * size),
            (hvd.Min, 1.0),  # the same op of the gradients, not the derivative
            (hvd.Max, float(size)),
        ):
            gradient = input_gradient(lambda x, op=op: [hvd.allreduce(x, op=op)], leaf(*shape))
            same(gradient, torch.full(shape, factor, dtype=torch.float64))
    gradient = input_gradient(
        lambda x: [hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)], leaf(2)
    )
    same(gradient, torch.full((2,), mean_factor() * size, dtype=torch.float64))


def test_allreduce(cluster):
    cluster.run(allreduce_gradients)


def documented_values() -> None:
    rank = hvd.rank()
    x = torch.ones(2, requires_grad=True)
    ((rank + 1) * hvd.allreduce(x, op=hvd.Average).sum()).backward()
    same(x.grad, torch.full((2,), 1.5))
    x = torch.ones(2, requires_grad=True)
    ((rank + 1) * hvd.allreduce(x, op=hvd.Sum).sum()).backward()
    same(x.grad, torch.full((2,), 3.0))
    x = torch.ones(2, requires_grad=True)
    ((rank + 1) * hvd.broadcast(x, 0).sum()).backward()
    same(x.grad, torch.full((2,), (1.5, 0.0)[rank]))
    x = torch.ones(2 + rank, requires_grad=True)
    weights = torch.arange(5.0) * (rank + 1)
    (hvd.allgather(x) * weights).sum().backward()
    same(x.grad, 1.5 * (torch.arange(2.0) if rank == 0 else torch.arange(2.0, 5.0)))


@pytest.mark.np(2)
def test_values_at_two_ranks(cluster):
    cluster.run(documented_values)


def grouped_gradients() -> None:
    xs = [leaf(2), torch.ones(3, dtype=torch.int64), leaf(2, 2), leaf(4)]
    ys = hvd.grouped_allreduce(xs, op=hvd.Sum)
    assert [y.requires_grad for y in ys] == [True, False, True, True]
    loss = (hvd.rank() + 1) * (ys[0].sum() + 10 * ys[2].sum())  # the last one is not used
    loss.backward()
    factor = mean_factor() * hvd.size()
    same(xs[0].grad, torch.full((2,), factor, dtype=torch.float64))
    same(xs[2].grad, torch.full((2, 2), 10 * factor, dtype=torch.float64))
    same(xs[3].grad, torch.zeros(4, dtype=torch.float64))


def test_grouped_allreduce(cluster):
    cluster.run(grouped_gradients)


def allgather_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = (rank * 2 + 1) % 3  # some ranks have none
    counts = [(r * 2 + 1) % 3 for r in range(size)]
    start = sum(counts[:rank])
    x = leaf(rows, 2)
    weights = torch.arange(sum(counts) * 2.0, dtype=torch.float64).reshape(-1, 2)
    ((rank + 1) * hvd.allgather(x) * weights).sum().backward()
    same(x.grad, weights[start : start + rows] * mean_factor())
    x, y = leaf(rows, 2), leaf(3)
    gathered = hvd.grouped_allgather([x, y])
    ((rank + 1) * ((gathered[0] * weights).sum() + gathered[1].sum() * 5)).backward()
    same(x.grad, weights[start : start + rows] * mean_factor())
    same(y.grad, torch.full((3,), 5 * mean_factor(), dtype=torch.float64))


def test_allgather_of_uneven_rows(cluster):
    cluster.run(allgather_gradients)


def broadcast_gradients(root: int) -> None:
    gradient = input_gradient(lambda x: [hvd.broadcast(x, root)], leaf(2, 3))
    factor = mean_factor() if hvd.rank() == root else 0.0
    same(gradient, torch.full((2, 3), factor, dtype=torch.float64))


def test_broadcast(cluster):
    for root in range(cluster.size):
        cluster.run(broadcast_gradients, root)


def through_compression() -> None:
    x = torch.ones(2, requires_grad=True)
    y = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert y.dtype == torch.float32
    ((hvd.rank() + 1) * y.sum()).backward()
    same(x.grad, torch.full((2,), mean_factor() * hvd.size()))


def test_casts_of_a_compression_are_differentiated(cluster):
    cluster.run(through_compression)


def adasum_gradients() -> None:
    x = leaf(5)
    weights = torch.arange(5.0, dtype=torch.float64) + hvd.rank()
    (hvd.allreduce(x, op=hvd.Adasum) * weights).sum().backward()
    same(x.grad, hvd.allreduce(weights, op=hvd.Adasum))
    x, y = leaf(5), leaf(2)
    ys = hvd.grouped_allreduce([x, y], op=hvd.Adasum)
    ((ys[0] * weights).sum() + ys[1].sum()).backward()
    same(x.grad, hvd.allreduce(weights, op=hvd.Adasum))
    same(y.grad, torch.ones(2, dtype=torch.float64))


def test_adasum_is_the_adasum_of_the_gradients(cluster):
    cluster.run(adasum_gradients)


def second_order() -> None:
    size = hvd.size()
    x = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
    y = hvd.allreduce(x, op=hvd.Sum)  # 3 * size
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)  # size * 3 y**2
    (second,) = torch.autograd.grad(first.sum(), x)  # size * size * 6 y
    same(first, torch.full((2,), 27.0 * size**3, dtype=torch.float64))
    same(second, torch.full((2,), 18.0 * size**4, dtype=torch.float64) / size)


def second_order_of_the_others() -> None:
    size = hvd.size()
    for function, divisor in (
        (hvd.allgather, size),  # its gradient is an average, whose own gradient is one again
        (hvd.alltoall, 1),
        (lambda x: hvd.reducescatter(x.repeat(size), op=hvd.Sum), 1),
    ):
        x = torch.full((size,), 2.0, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad((function(x) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        # The first is c x**2 with some constant c, for equal x everywhere.
        same(second, first.detach() / divisor)


def graphs_only_where_asked_for() -> None:
    x = leaf(2)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
        assert not hvd.allgather(x).requires_grad
        assert not hvd.broadcast(x, 0).requires_grad
        assert not any(y.requires_grad for y in hvd.grouped_allreduce([x, x]))
    assert not hvd.allreduce(x.detach()).requires_grad
    y = hvd.allreduce(x)
    assert y.requires_grad and not y.is_leaf
    before = x._version
    y.sum().backward()
    assert x._version == before


def test_no_grad_builds_no_graph(cluster):
    cluster.run(graphs_only_where_asked_for)


def incoming_gradient_is_kept() -> None:
    """A backward pass must not write into a gradient that others see."""
    seen = []
    x = leaf(3)
    y = hvd.allreduce(x, op=hvd.Sum)
    y.register_hook(seen.append)
    (y * 2).sum().backward()
    same(seen[0], torch.full((3,), 2.0, dtype=torch.float64))


def test_the_incoming_gradient_is_not_modified(cluster):
    cluster.run(incoming_gradient_is_kept)


def half_rank_extra_calls() -> None:
    """Calls of another kind on one rank only do not derail the unnamed backward operations."""
    if hvd.rank() == 0:
        handle = hvd.allgather_async(torch.ones(1), name="extra")
    x = leaf(2)
    hvd.allreduce(x, op=hvd.Sum).sum().backward()
    same(x.grad, torch.full((2,), float(hvd.size()), dtype=torch.float64))
    if hvd.rank() != 0:
        handle = hvd.allgather_async(torch.ones(1), name="extra")
    same(hvd.synchronize(handle), torch.ones(hvd.size()))


def test_backward_after_uneven_calls(cluster):
    cluster.run(half_rank_extra_calls)


def test_second_derivative(cluster):
    cluster.run(second_order)
    cluster.run(second_order_of_the_others)
