"""DistributedOptimizer over process sets: only their ranks reduce, and sets do not wait for one
another."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.cluster import Cluster
from support.gradients import Submissions, parameter, push, wrap
from torch import nn
from torch.nn.functional import embedding

import hvdtorch as hvd


@contextmanager
def sets(*ranks: list[int]) -> Iterator[list[hvd.ProcessSet]]:
    registered = [hvd.add_process_set(each) for each in ranks]
    try:
        yield registered
    finally:
        for each in registered:
            hvd.remove_process_set(each)


def split(options: dict[str, Any]) -> list[object]:
    """Ranks 0 and 1 reduce with each other; the others are alone, or another set."""
    with sets([0, 1], list(range(2, hvd.size()))) as (first, second):
        mine = first if hvd.rank() < 2 else second
        w, v = parameter(0.0, 0.0), parameter(0.0)
        optimizer = wrap({"w": w, "v": v}, process_set=mine, **options)
        assert optimizer.process_set is mine and optimizer.op == options.get("op", hvd.Average)
        push(1.0 + hvd.rank(), w)
        optimizer.step()
        # rank 0's loss does not reach v, that of rank 1 does
        if hvd.rank() % 2:
            push(1.0 + hvd.rank(), v)
        optimizer.step()
        return [*w.grad.tolist(), None if v.grad is None else v.grad.item()]


@pytest.mark.np(3, 4)
@pytest.mark.parametrize(
    "options",
    [{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 1}],
    ids=str,
)
def test_only_the_ranks_of_the_set_reduce(cluster: Cluster, options: dict[str, Any]) -> None:
    total = options.get("op") == hvd.Sum
    first = [3.0, 3.0, 2.0] if total else [1.5, 1.5, 1.0]
    expected: list[list[float | None]] = [first, first]
    if cluster.size == 3:
        expected.append([3.0, 3.0, None])
    else:
        expected += [[7.0, 7.0, 4.0] if total else [3.5, 3.5, 2.0]] * 2
    assert cluster.run(split, options) == expected


def not_a_member() -> list[object]:
    with sets([0, 2]) as (some,):
        w = parameter(0.0)
        optimizer = wrap({"w": w}, process_set=some, backward_passes_per_step=1)
        with Submissions() as submissions:
            push(1.0 + hvd.rank(), w)
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
            extra = parameter(0.0)
            optimizer.add_param_group({"params": [extra]})
            push(2.0, w, extra)
            optimizer.step()
        assert optimizer.process_set is some
        return [len(submissions) > 0, round(w.item(), 5), round(extra.item(), 5)]


@pytest.mark.np(3)
def test_on_other_ranks_the_optimizer_is_local(cluster: Cluster) -> None:
    member = [True, -0.4, -0.2]  # 2.0 of its own and 2.0 on average
    assert cluster.run(not_a_member) == [member, [False, -0.4, -0.2], member]


def several_sets_in_one_pass(order: str) -> list[float | None]:
    """A trunk of all ranks and overlapping sets in one model; `order` of wrapping and stepping."""
    with sets([0, 1], [1, 2], [0, 2]) as three:
        trunk, *experts = (parameter(0.0) for _ in range(4))
        optimizers = [wrap({"trunk": trunk})]
        for number, (expert, each) in enumerate(zip(experts, three, strict=True)):
            optimizers.append(wrap({f"expert{number}": expert}, process_set=each))
        if order == "reversed":
            optimizers.reverse()
        for turn in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            # Besides the trunk, the loss reaches the experts that the rank has; in turn 1 only the
            # first of them, in turn 2 none on rank 2.
            mine = [e for e, each in zip(experts, three, strict=True) if each.included()]
            reached = {0: mine, 1: mine[:1], 2: mine if hvd.rank() < 2 else []}[turn]
            push(1.0 + hvd.rank(), trunk, *reached)
            for optimizer in optimizers:
                optimizer.step()
        return [None if p.grad is None else p.grad.item() for p in (trunk, *experts)]


@pytest.mark.np(3)
@pytest.mark.parametrize("order", ["as wrapped", "reversed"])
def test_one_pass_may_reach_several_sets(cluster: Cluster, order: str) -> None:
    # The last turn: expert 0 has gradients 1 and 2; expert 1 has 2, and none from rank 2; expert 2
    # has 1, and none from rank 2. Ranks outside a set leave its expert alone.
    assert cluster.run(several_sets_in_one_pass, order) == [
        [2.0, 1.5, None, 0.5],
        [2.0, 1.5, 1.0, None],
        [2.0, None, 1.0, 0.5],
    ]


def passes_of_their_own() -> list[float | None]:
    """Rank 1 trains with rank 0 in one pass and with rank 2 in another, each with its step; rank 0
    and rank 2 run one pass each."""
    with sets([0, 1], [1, 2]) as (left, right):
        a, b = parameter(0.0), parameter(0.0)
        a_optimizer, b_optimizer = (
            wrap({"a": a}, process_set=left),
            wrap({"b": b}, process_set=right),
        )
        for _ in range(3):
            a_optimizer.zero_grad()
            b_optimizer.zero_grad()
            if hvd.rank() < 2:
                push(1.0 + hvd.rank(), a)
                a_optimizer.step()
            if hvd.rank() > 0:
                push(1.0 + hvd.rank(), b)
                b_optimizer.step()
        return [None if p.grad is None else p.grad.item() for p in (a, b)]


@pytest.mark.np(3)
def test_sets_may_have_passes_of_their_own(cluster: Cluster) -> None:
    assert cluster.run(passes_of_their_own) == [[1.5, None], [1.5, 2.5], [None, 2.5]]


def sparse_in_a_set() -> list[float]:
    with sets([1, 2]) as (some,):
        table = nn.Parameter(torch.zeros(3, 1))
        optimizer = wrap({"table": table}, process_set=some)
        if hvd.rank() != 1:  # never touches it
            embedding(torch.tensor([hvd.rank(), 1]), table, sparse=True).sum().backward()
        optimizer.step()
        return [round(-10 * value, 5) + 0.0 for value in table.flatten().tolist()]


@pytest.mark.np(3)
def test_sparse_gradients(cluster: Cluster) -> None:
    assert cluster.run(sparse_in_a_set) == [[1.0, 1.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]


def adasum_in_a_set() -> list[float]:
    with sets([0, 2]) as (some,):
        w = parameter(0.0, 0.0, 0.0)
        optimizer = wrap({"w": w}, process_set=some, op=hvd.Adasum)
        gradient = torch.zeros(3)
        gradient[hvd.rank()] = 10.0
        (w * gradient).sum().backward()
        optimizer.step()
        return w.tolist()


@pytest.mark.np(3)
def test_adasum(cluster: Cluster) -> None:
    both = [-1.0, 0.0, -1.0]  # orthogonal changes are added
    assert cluster.run(adasum_in_a_set) == [both, [0.0, -1.0, 0.0], both]


def shared_between_sets() -> str:
    with sets([0, 1]) as (some,):
        w = parameter(0.0)
        everyone = wrap({"shared.w": w})
        if hvd.rank() < 2:
            with pytest.raises(ValueError) as error:
                wrap({"mine": w}, process_set=some)
            text = str(error.value)
        else:
            wrap({"mine": w}, process_set=some)  # nothing is reduced here twice
            text = ""
        push(1.0 + hvd.rank(), w)
        everyone.step()
        assert w.grad.item() == 2.0
        return text


@pytest.mark.np(3)
def test_a_parameter_is_reduced_over_one_set(cluster: Cluster) -> None:
    first, second, third = cluster.run(shared_between_sets)
    for text in (first, second):
        assert "'mine'" in text and "process_set=[0, 1] here" in text
    assert third == ""


# --- Sets that are gone ------------------------------------------------------------------------


def removed(when: str) -> list[str]:
    w = parameter(0.0)
    some = hvd.add_process_set([0, 1])
    op = hvd.Adasum if when == "adasum" else hvd.Average
    optimizer = wrap({"w": w}, process_set=some, op=op)
    push(1.0, w)
    optimizer.step()
    if when == "shutdown":
        hvd.barrier()
        hvd.shutdown()
        hvd.init()
    else:
        hvd.remove_process_set(some)
    texts = []
    if hvd.rank() < 2:
        if when != "adasum":
            with pytest.raises(TypeError) as error:
                push(1.0, w)
            texts.append(str(error.value))
        with pytest.raises(TypeError) as error:
            optimizer.step()
        texts.append(str(error.value))
    else:
        push(1.0, w)
        optimizer.step()
    with pytest.raises(TypeError, match="not registered"):
        wrap({"again": parameter(0.0)}, process_set=some)
    # Registered again it works again.
    hvd.add_process_set(some)
    optimizer.zero_grad()
    push(1.0 + hvd.rank(), w)
    optimizer.step()
    assert hvd.rank() > 1 or op == hvd.Adasum or w.grad.item() == 1.5
    hvd.remove_process_set(some)
    return texts


@pytest.mark.np(3)
@pytest.mark.parametrize("when", ["removed", "shutdown", "adasum"])
def test_a_set_that_is_gone(cluster: Cluster, when: str) -> None:
    first, second, third = cluster.run(removed, when)
    assert first == second and len(first) == (1 if when == "adasum" else 2) and third == []
    assert all("not registered" in text and "[0, 1]" in text for text in first)


def of_one_rank() -> list[object]:
    with sets([1]) as (some,):
        w = parameter(0.0)
        optimizer = wrap({"w": w}, process_set=some, op=hvd.Sum)
        with Submissions() as submissions:
            push(1.0 + hvd.rank(), w)
            optimizer.step()
        return [w.grad.item(), len(submissions)]


@pytest.mark.np(2)
def test_a_set_of_one_rank(cluster: Cluster) -> None:
    assert cluster.run(of_one_rank) == [[1.0, 0], [2.0, 0]]


def different_parameters() -> str:
    with sets([0, 1], [2]) as (some, _):
        names = ["x", "y"] if hvd.rank() == 1 else ["x", "z"]
        named = {f"set.{name}": parameter(0.0) for name in names}
        optimizer = wrap(named, process_set=some)
        if hvd.rank() == 2:
            return ""
        with pytest.raises(hvd.HorovodInternalError) as error:
            push(1.0, *named.values())
            optimizer.step()
        return str(error.value)


@pytest.mark.np(3)
def test_ranks_of_a_set_that_wrapped_different_things_are_told(cluster: Cluster) -> None:
    first, second, _ = cluster.run(different_parameters)
    assert first == second and "'set.z'" in first and "on rank 1" in first
