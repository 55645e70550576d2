"""Gradients through collectives while a rank, the lowest, has joined and takes no part."""

import pytest
import torch
from support.checks import same

import hvdtorch as hvd


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64, requires_grad=True)


def backward(output: torch.Tensor) -> None:
    """The incoming gradient is rank + 1."""
    ((hvd.rank() + 1) * output).sum().backward()


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def absent_all_along() -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank == 0:
        hvd.join()
        return
    total = float(sum(r + 1 for r in range(1, size)))  # of the incoming gradients

    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        x = leaf(2)
        backward(hvd.allreduce(x, op=op))
        same(x.grad, torch.full((2,), total, dtype=torch.float64) / divisor)

    x, y = leaf(rank), leaf(3)
    gathered, other = hvd.grouped_allgather([x, y])
    assert gathered.shape[0] == sum(range(1, size))
    backward(gathered * torch.arange(gathered.shape[0]) + 0 * other.sum())
    start = sum(range(1, rank))
    same(x.grad, torch.arange(start, start + rank, dtype=torch.float64) * total / size)

    x = leaf(2)
    backward(hvd.broadcast(x, 1))
    same(x.grad, torch.full((2,), total / size if rank == 1 else 0.0, dtype=torch.float64))

    x = leaf(size + 1)  # one row to each rank, one stays here
    output, received = hvd.alltoall(x, [1] * size)
    same(received, torch.tensor([0] + [1] * (size - 1), dtype=torch.int32))
    backward(output)
    same(x.grad, column(0, *(to + 1 for to in range(1, size)), 0))

    x, y = leaf(size), leaf(2 * size + 1)
    backward(hvd.reducescatter(x, op=hvd.Sum))
    shares = column(0, *((r + 1) * size for r in range(1, size)))
    same(x.grad, shares)
    x.grad = None
    first, second = hvd.grouped_reducescatter([x, y], op=hvd.Sum)
    backward(first)
    backward(second)
    same(x.grad, shares)
    same(y.grad, torch.cat([column(0, 0, 0), shares[1:].repeat_interleave(2)]))
    hvd.join()


@pytest.mark.np(2, 3, 4)
def test_a_rank_absent_all_along(cluster):
    cluster.run(absent_all_along)


def leaves_before_backward() -> None:
    rank, size = hvd.rank(), hvd.size()
    split, shared = leaf(size), leaf(size)
    none, some = leaf(0 if rank == 0 else 1), leaf(1)
    outputs = [
        hvd.alltoall(split),
        hvd.reducescatter(shared, op=hvd.Sum),
        hvd.allgather(none),
        hvd.allgather(some),
    ]
    if rank == 0:
        hvd.join()
        return
    for output in outputs:
        backward(output)
    same(split.grad, column(0, *(to + 1 for to in range(1, size))))
    same(shared.grad, column(0, *((r + 1) * size for r in range(1, size))))
    same(none.grad, column(sum(r + 1 for r in range(1, size)) / size))
    same(some.grad, none.grad)
    hvd.join()


@pytest.mark.np(2, 3, 4)
def test_a_rank_that_joins_between_forward_and_backward(cluster):
    cluster.run(leaves_before_backward)
