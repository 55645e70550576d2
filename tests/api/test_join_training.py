"""Training with ranks that have different numbers of batches: `hvd.join()` after the last one.

Rank r has size - r batches, so the highest rank joins first and rank 0 last.
"""

import pytest
import torch
from support.checks import same
from support.gradients import parameter, push, synchronize_and_step, wrap
from torch import Tensor, nn

import hvdtorch as hvd

OPTIONS = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "accumulation": {"backward_passes_per_step": 2},
    "groups": {"num_groups": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "compression": {"compression": hvd.Compression.fp16},
}


def reduced(batch: int, passes: int, op: int, active_only: bool) -> float:
    """Rank r's gradient in a pass of batch b is (r + 1) * (b + 1) * 4."""
    size = hvd.size()
    active = [r for r in range(size) if size - r > batch]
    total = float(sum((r + 1) * (batch + 1) * 4 for r in active) * passes)
    return total if op == hvd.Sum else total / (len(active) if active_only else size)


def epochs(option: str, explicit: bool, active_only: bool) -> None:
    options = OPTIONS[option]
    passes = options.get("backward_passes_per_step", 1)
    op = options.get("op", hvd.Average)
    rank, size = hvd.rank(), hvd.size()
    names = {name: parameter(0.0, 0.0) for name in "abcd"}
    optimizer = wrap(names, **options)
    for _ in range(2):
        for batch in range(size - rank):
            for _ in range(passes):
                push((rank + 1) * (batch + 1) * 4, *names.values())
            expected = reduced(batch, passes, op, active_only)
            for p in names.values():
                same(p.grad, torch.full((2,), expected))
            synchronize_and_step(optimizer, explicit)
            optimizer.zero_grad()
        assert hvd.join() == 0
        hvd.broadcast_parameters(names, 0)  # from the rank that has seen every step
    steps = sum(reduced(batch, passes, op, active_only) for batch in range(size))
    for p in names.values():
        torch.testing.assert_close(p.detach(), torch.full((2,), -0.1 * 2 * steps))


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_averaged_without_the_joined_ranks(cluster, option, explicit):
    cluster.run(epochs, option, explicit, False)


@pytest.mark.parametrize("option", ["plain", "accumulation", "predivide"])
def test_the_average_among_the_active_ranks(all_clusters, option):
    cluster = all_clusters.get(2, {"HVDTORCH_JOIN_DIVISOR": "active"})
    cluster.run(epochs, option, False, True)


def four_from_rank_0() -> list[float]:
    """Rank 0 has 3 batches, rank 1 has one."""
    w = parameter(0.0)
    optimizer = wrap({"w": w})
    seen = []
    for _ in range((3, 1)[hvd.rank()]):
        push(4.0 if hvd.rank() == 0 else 2.0, w)
        seen.append(w.grad.item())
        optimizer.step()
        optimizer.zero_grad()
    seen.append(hvd.join())
    return seen


@pytest.mark.np(2)
def test_one_rank_has_three_batches_and_the_other_one(cluster):
    assert cluster.run(four_from_rank_0) == [[3, 2, 2, 0], [3, 0]]


def in_the_middle_of_an_accumulation() -> None:
    """Rank 1 joins with a pass accumulated that was not reduced; it goes on with it afterwards."""
    w = parameter(0.0)
    optimizer = wrap({"w": w}, backward_passes_per_step=2)
    rank = hvd.rank()
    push(1.0 + rank, w)
    if rank == 0:
        push(4.0, w)
        same(w.grad, torch.tensor([2.5]))  # without rank 1, divided by the size
        optimizer.step()
        optimizer.zero_grad()
        push(1.0, w)
    assert hvd.join() == 0
    push(1.0, w)  # passes are counted anew
    same(w.grad, torch.tensor([(1.0 if rank == 0 else 2.0) + 1.0]))
    push(1.0, w)
    same(w.grad, torch.tensor([((1.0 + 2.0) + (2.0 + 2.0)) / 2]))
    optimizer.step()


@pytest.mark.np(2)
def test_a_rank_joins_in_the_middle_of_an_accumulation(cluster):
    cluster.run(in_the_middle_of_an_accumulation)


def branches() -> None:
    """A parameter with a gradient on one active rank only, and one that only joined ranks used."""
    rank, size = hvd.rank(), hvd.size()
    a, b, c = (parameter(0.0) for _ in range(3))
    optimizer = wrap({"a": a, "b": b, "c": c})
    if rank == size - 1:
        push(6.0, a, c)
    else:
        push(6.0, a)
    same(a.grad, torch.tensor([6.0]))
    same(c.grad, torch.tensor([6.0 / size]))
    assert b.grad is None
    optimizer.zero_grad()
    if rank == size - 1:
        hvd.join()
        return
    push(12.0, b) if rank == 0 else push(12.0, a)
    same(b.grad, torch.tensor([12.0 / size]))
    if size > 2:
        same(a.grad, torch.tensor([12.0 * (size - 2) / size]))
    else:
        assert a.grad is None
    assert c.grad is None
    hvd.join()


@pytest.mark.np(2, 3)
def test_parameters_that_some_ranks_use(cluster):
    cluster.run(branches)


def embedding(sparse_as_dense: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    table = nn.Embedding(3, 1, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1),
        named_parameters=table.named_parameters(),
        sparse_as_dense=sparse_as_dense,
    )
    for batch in range(size - rank):
        table(torch.tensor([0, 1] if rank == 0 else [1, 1])).sum().backward()
        others = len([r for r in range(1, size) if size - r > batch])
        dense = table.weight.grad.to_dense() if table.weight.grad.is_sparse else table.weight.grad
        torch.testing.assert_close(
            dense, torch.tensor([[1.0 / size], [(1.0 + 2 * others) / size], [0.0]])
        )
        optimizer.step()
        optimizer.zero_grad()
    assert hvd.join() == 0


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients(cluster, sparse_as_dense):
    cluster.run(embedding, sparse_as_dense)


def adasum() -> None:
    rank, size = hvd.rank(), hvd.size()
    w = parameter(*[0.0] * size)
    optimizer = wrap({"w": w}, op=hvd.Adasum)
    for batch in range(size - rank):
        (w[rank] * 2).backward()  # orthogonal to the others': Adasum is the sum
        optimizer.step()
        optimizer.zero_grad()
        steps = torch.tensor([float(min(size - r, batch + 1)) for r in range(size)])
        torch.testing.assert_close(w.detach(), -0.2 * steps)
    assert hvd.join() == 0


@pytest.mark.np(2, 3)
def test_adasum(cluster):
    cluster.run(adasum)


def batch_norm() -> None:
    """As torch's layer on the joined batch of the ranks that still take part."""
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(1)
    plain, synced = nn.BatchNorm1d(4).double(), hvd.SyncBatchNorm(4).double()
    for batch in range(size - rank):
        active = [r for r in range(size) if size - r > batch]
        rows = torch.randn(sum(r + 2 for r in range(size)), 4, dtype=torch.float64) * 3 + 1
        factors = torch.randn_like(rows)
        parts = dict(enumerate(rows.split([r + 2 for r in range(size)])))
        whole = torch.cat([parts[r] for r in active]).requires_grad_()
        weights = dict(enumerate(factors.split([r + 2 for r in range(size)])))
        expected = plain(whole)
        (expected * torch.cat([weights[r] for r in active])).sum().backward()
        mine = parts[rank].clone().requires_grad_()
        actual = synced(mine)
        (actual * weights[rank]).sum().backward()
        at = active.index(rank)

        def part(tensor: Tensor, active: list[int] = active, at: int = at) -> Tensor:
            return tensor.split([r + 2 for r in active])[at]

        torch.testing.assert_close(actual, part(expected), rtol=0, atol=1e-12)
        torch.testing.assert_close(mine.grad, part(whole.grad), rtol=0, atol=1e-12)
        torch.testing.assert_close(synced.running_mean, plain.running_mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(synced.running_var, plain.running_var, rtol=0, atol=1e-12)
    assert hvd.join() == 0


@pytest.mark.np(2, 3)
def test_sync_batch_norm(cluster):
    cluster.run(batch_norm)


def in_a_process_set() -> None:
    """Only the members' gradients are reduced; a joined member is absent, others never counted."""
    rank, size = hvd.rank(), hvd.size()
    some = hvd.add_process_set([0, size - 1])
    w = parameter(0.0)
    optimizer = wrap({"w": w}, process_set=some)
    for batch in range(size - rank):
        push(4.0, w)
        if some.included():
            same(w.grad, torch.tensor([4.0 if batch == 0 else 2.0]))
        else:
            same(w.grad, torch.tensor([4.0]))
        optimizer.step()
        optimizer.zero_grad()
    assert hvd.join() in (0, 1)  # rank 1 is no member: nothing says which of the two is the last
    assert hvd.remove_process_set(some)


@pytest.mark.np(3)
def test_an_optimizer_of_a_process_set(cluster):
    cluster.run(in_a_process_set)
