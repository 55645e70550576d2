"""DistributedOptimizer with hvd.join(): ranks with different numbers of batches."""

from typing import Any

import pytest
import torch
from support.cluster import Cluster
from support.gradients import parameter, push, wrap
from support.scripts import run_script
from torch import nn
from torch.nn.functional import embedding

import hvdtorch as hvd


def epochs(batches: list[int], passes: int, options: dict[str, Any]) -> list[list[float]]:
    """Two epochs in which rank r has batches[r] batches, with a step every `passes` of them and one
    for what is left. Batch i of rank r has gradient (i + 1) * (r + 1). What each step applied."""
    w, v = parameter(0.0), parameter(0.0)
    optimizer = wrap({"w": w, "v": v}, backward_passes_per_step=passes, **options)
    seen: list[list[float]] = []
    for _ in range(2):
        applied: list[float] = []
        last = batches[hvd.rank()]
        for i in range(last):
            push((i + 1.0) * (hvd.rank() + 1), w, v)
            if (i + 1) % passes == 0 or i + 1 == last:
                optimizer.step()
                assert v.grad.item() == w.grad.item()
                applied.append(w.grad.item())
                optimizer.zero_grad()
        seen.append(applied)
        assert hvd.join() == batches.index(max(batches))
    return seen


@pytest.mark.np(2)
@pytest.mark.parametrize(
    "options", [{}, {"groups": 1}, {"gradient_predivide_factor": 2.0}], ids=str
)
def test_one_batch_against_three(cluster: Cluster, options: dict[str, Any]) -> None:
    # (1 + 2) / 2, then rank 0 alone, divided by the size
    first, second = [1.5, 1.0, 1.5], [1.5]
    assert cluster.run(epochs, [3, 1], 1, options) == [[first] * 2, [second] * 2]


@pytest.mark.np(2)
def test_with_sums(cluster: Cluster) -> None:
    assert cluster.run(epochs, [1, 3], 1, {"op": hvd.Sum}) == [[[3.0]] * 2, [[3.0, 4.0, 6.0]] * 2]


@pytest.mark.np(2)
@pytest.mark.parametrize("options", [{}, {"groups": 1}], ids=str)
def test_with_accumulation(cluster: Cluster, options: dict[str, Any]) -> None:
    # Rank 0 has batches 1 + 2 and 3; rank 1 has 2 only, which its step adds to rank 0's first two.
    first, second = [(1 + 2 + 2) / 2, 3 / 2], [(1 + 2 + 2) / 2]
    assert cluster.run(epochs, [3, 1], 2, options) == [[first] * 2, [second] * 2]


@pytest.mark.np(3)
def test_ranks_that_join_one_after_another(cluster: Cluster) -> None:
    got = cluster.run(epochs, [1, 2, 3], 1, {"op": hvd.Sum})
    assert got == [[[6.0]] * 2, [[6.0, 10.0]] * 2, [[6.0, 10.0, 9.0]] * 2]


def leftover_passes() -> list[float]:
    """Epochs end in the middle of an accumulation: the ranks' counts differ, until they join."""
    w = parameter(0.0)
    optimizer = wrap({"w": w}, backward_passes_per_step=2)
    seen = []
    for _ in range(2):
        for _ in range(3 if hvd.rank() == 0 else 1):
            push(2.0, w)
        optimizer.zero_grad()
        hvd.join()
        for number in range(4):  # all ranks together again
            push(4.0 + 2 * hvd.rank(), w)
            if number % 2:
                optimizer.step()
                seen.append(w.grad.item())
                optimizer.zero_grad()
    return seen


@pytest.mark.np(2)
def test_after_a_join_the_ranks_are_in_step(cluster: Cluster) -> None:
    assert cluster.run(leftover_passes) == [[10.0] * 4] * 2


def kept_for_later() -> list[float]:
    """What was accumulated before a join and not reduced is part of the next reduction."""
    w = parameter(0.0)
    optimizer = wrap({"w": w}, backward_passes_per_step=2)
    if hvd.rank() == 0:
        push(8.0, w)
    hvd.join()
    seen = []
    for _ in range(2):
        push(1.0 + hvd.rank(), w)
        push(1.0 + hvd.rank(), w)
        optimizer.step()
        seen.append(w.grad.item())
        optimizer.zero_grad()
    return seen


@pytest.mark.np(2)
def test_what_was_accumulated_before_a_join_is_reduced_after_it(cluster: Cluster) -> None:
    assert cluster.run(kept_for_later) == [[3.0 + 4.0, 3.0]] * 2


def sparse_epochs(op: int, as_dense: bool) -> list[list[float]]:
    table, w = nn.Parameter(torch.zeros(3, 1)), parameter(0.0)
    optimizer = wrap({"table": table, "w": w}, op=op, sparse_as_dense=as_dense)
    seen = []
    for number in range(3 if hvd.rank() == 0 else 1):
        loss = embedding(torch.tensor([hvd.rank(), 1]), table, sparse=True).sum()
        (loss * 1.0 + w.sum()).backward() if number != 1 else push(1.0, w)
        optimizer.step()
        seen.append([] if table.grad is None else table.grad.to_dense().flatten().tolist())
        optimizer.zero_grad()
    hvd.join()
    return seen


@pytest.mark.np(2)
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize(("op", "factor"), [(hvd.Average, 0.5), (hvd.Sum, 1.0)])
def test_with_sparse_gradients(cluster: Cluster, op: int, factor: float, as_dense: bool) -> None:
    first = [factor, 3 * factor, 0.0]
    alone = [factor, factor, 0.0]
    assert cluster.run(sparse_epochs, op, as_dense) == [[first, [], alone], [first]]


def adasum_epochs() -> list[float]:
    w = parameter(0.0, 0.0)
    optimizer = wrap({"w": w}, op=hvd.Adasum)
    seen = []
    for _ in range(3 if hvd.rank() == 0 else 1):
        gradient = torch.zeros(2)
        gradient[hvd.rank()] = 10.0
        (w * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += w.tolist()
    hvd.join()
    return seen


@pytest.mark.np(2)
def test_with_adasum(cluster: Cluster) -> None:
    # Orthogonal changes; then rank 0's own.
    assert cluster.run(adasum_epochs) == [[-1.0, -1.0, -2.0, -1.0, -3.0, -1.0], [-1.0, -1.0]]


def in_a_set() -> list[float]:
    """Rank 2 joins at once; ranks 1 and 2 are a set, of which rank 1 is left."""
    some = hvd.add_process_set([1, 2])
    w, v = parameter(0.0), parameter(0.0)
    everyone, few = wrap({"w": w}), wrap({"v": v}, process_set=some)
    seen: list[float] = []
    if hvd.rank() < 2:
        push(6.0, w, v)
        everyone.step()
        few.step()
        seen = [w.grad.item(), v.grad.item()]
    hvd.join()
    hvd.remove_process_set(some)
    return seen


@pytest.mark.np(3)
def test_a_rank_that_joined_is_absent_from_its_sets(cluster: Cluster) -> None:
    assert cluster.run(in_a_set) == [[4.0, 6.0], [4.0, 3.0], []]


DIVIDED_BY_THE_ACTIVE = """
import torch
from torch.nn.functional import embedding
import hvdtorch as hvd

hvd.init()
table, w = torch.nn.Parameter(torch.zeros(2, 1)), torch.nn.Parameter(torch.zeros(1))
sgd = torch.optim.SGD([table, w], lr=0.1)
optimizer = hvd.DistributedOptimizer(sgd, [("table", table), ("w", w)])
if hvd.rank() == 0:
    (embedding(torch.tensor([1]), table, sparse=True).sum() * 4.0 + w.sum() * 4.0).backward()
    optimizer.step()
    print("gradients", w.grad.tolist(), table.grad.to_dense().flatten().tolist(), flush=True)
print("last", hvd.join(), flush=True)
"""


@pytest.mark.parametrize(("divisor", "value"), [("size", 2.0), ("active", 4.0)])
def test_the_divisor_of_averages(divisor: str, value: float) -> None:
    job = run_script(2, DIVIDED_BY_THE_ACTIVE, env={"HVDTORCH_JOIN_DIVISOR": divisor})
    assert job.outputs == [f"gradients [{value}] [0.0, {value}]\nlast 0\n", "last 0\n"]
