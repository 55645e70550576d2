"""DistributedOptimizer: `groups`, gradients that are reduced together."""

import random
import re

import pytest
import torch
from support.cluster import Cluster
from support.gradients import Submissions, parameter, push, wrap
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import hvdtorch as hvd


def unscoped(submissions: Submissions) -> list[str]:
    """Names of operations, without what tells this test's parameters from those of others."""
    return [re.sub(r"optimizer\d+\.", "", name) for name in submissions.gradients()]


# --- What is submitted -------------------------------------------------------------------------


def grouped_by(groups: int | list[list[int]], late: bool) -> tuple[list[str], list[float]]:
    """The operations of one backward() over p0..p4, of which p3 needs no gradient."""
    named = {f"p{i}": parameter(0.0) for i in range(5)}
    p = list(named.values())
    p[3].requires_grad_(False)
    given = groups if isinstance(groups, int) else [[p[i] for i in group] for group in groups]
    options = {"backward_passes_per_step": 2} if late else {}
    optimizer = wrap(named, groups=given, **options)
    with Submissions() as submissions:
        if late:  # the two passes reach different parameters
            push(1.0 + hvd.rank(), *p[:2])
            assert not submissions
            push(1.0 + hvd.rank(), p[2], p[4])
        else:
            push(1.0 + hvd.rank(), p[0], p[1], p[2], p[4])
        names = unscoped(submissions)
        optimizer.step()
    return names, [each.grad.item() for each in p if each.grad is not None]


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("groups", "names"),
    [
        (1, ["grouped_allreduce.p0"]),
        (2, ["grouped_allreduce.p0", "grouped_allreduce.p2"]),
        (3, ["allreduce.p2", "allreduce.p4", "grouped_allreduce.p0"]),
        (4, ["allreduce.p0", "allreduce.p1", "allreduce.p2", "allreduce.p4"]),
        (9, ["allreduce.p0", "allreduce.p1", "allreduce.p2", "allreduce.p4"]),
        ([[4, 0]], ["allreduce.p1", "allreduce.p2", "grouped_allreduce.p4"]),
        ([[2], [], [1, 4]], ["allreduce.p0", "allreduce.p2", "grouped_allreduce.p1"]),
    ],
)
def test_each_group_is_one_operation(
    cluster: Cluster, groups: int | list[list[int]], names: list[str], late: bool
) -> None:
    mean = (1 + cluster.size) / 2
    assert cluster.run(grouped_by, groups, late) == [(names, [mean] * 4)] * cluster.size


def launched_when_complete() -> list[list[str]]:
    """What has been submitted when each of three gradients is ready; two of them are a group."""
    named = {f"complete.{i}": parameter(0.0) for i in range(3)}
    a, b, c = named.values()
    optimizer = wrap(named, groups=[[a, b]])
    optimizer.step()  # the ranks agree, so the next pass launches what is ready
    seen: list[list[str]] = []
    with Submissions() as submissions:
        for each in (a, b, c):
            # Hooks of the node run after those of the parameter, in the order of registration.
            node = get_gradient_edge(each).node
            node.register_hook(lambda *_: seen.append(submissions.gradients()))
        # The last one in the chain fires first.
        total = a.sum()
        total = total * 1.0 + c.sum()
        (total * 1.0 + b.sum()).backward()
    optimizer.step()
    return seen


@pytest.mark.np(2)
def test_a_group_is_launched_by_the_last_of_its_gradients(cluster: Cluster) -> None:
    alone, group = "allreduce.complete.2", "grouped_allreduce.complete.0"
    assert cluster.run(launched_when_complete) == [[[], [alone], [alone, group]]] * 2


def deprecated_number() -> list[str]:
    a, b = parameter(0.0), parameter(0.0)
    sgd = torch.optim.SGD([a, b], lr=0.1)
    with pytest.warns(DeprecationWarning, match="use groups"):
        optimizer = hvd.DistributedOptimizer(sgd, [("old.a", a), ("old.b", b)], num_groups=1)
    with Submissions() as submissions:
        push(1.0, a, b)
    optimizer.step()
    return submissions.gradients()


@pytest.mark.np(2)
def test_num_groups_is_the_old_name(cluster: Cluster) -> None:
    assert cluster.run(deprecated_number) == [["grouped_allreduce.old.a"]] * 2


# --- Ranks that differ in what fired -----------------------------------------------------------


def group_partly_reached(case: str, op: int) -> list[float | None]:
    """Two groups, a b c and d e; rank r's loss reaches what the case says."""
    named = {name: parameter(0.0) for name in "abcde"}
    a, b, c, d, e = named.values()
    optimizer = wrap(named, groups=[[a, b, c], [d, e]], op=op)
    reached = case.split()[hvd.rank()]
    for factor in (1.0, 10.0):  # without a zero_grad() between
        extra = torch.zeros(1, requires_grad=True)  # a loss that may reach none of them
        reached_sum = sum((named[name].sum() for name in reached if name != "-"), start=extra * 1.0)
        (reached_sum * factor).sum().backward()
        optimizer.step()
    return [None if p.grad is None else p.grad.item() for p in named.values()]


@pytest.mark.np(2)
@pytest.mark.parametrize(("op", "each"), [(hvd.Average, 0.5), (hvd.Sum, 1.0)])
@pytest.mark.parametrize(
    "case", ["abcde abc", "abc a", "ab bc", "a d", "abc -", "- -", "abcde de", "ae be", "- b"]
)
def test_ranks_may_reach_different_members_of_a_group(
    cluster: Cluster, case: str, op: int, each: float
) -> None:
    expected: list[float | None] = [case.count(name) * each * 11 or None for name in "abcde"]
    for seen in cluster.run(group_partly_reached, case, op):
        assert seen == expected


class Plan:
    """Random groups, options and passes, known from the seed; ranks reach different parameters."""

    def __init__(self, seed: int, size: int) -> None:
        choose = random.Random(seed)
        order = choose.sample(range(7), 6)
        self.groups = [order[:4], order[4:]]
        self.op, self.passes = choose.choice([hvd.Average, hvd.Sum]), choose.choice([1, 2, 3])
        self.steps: list[list[list[list[int]]]] = []  # step, pass, rank: indices of parameters
        self.zeros: list[bool | None] = []  # set_to_none of the zero_grad() after a step, if any
        for _ in range(5):
            passes = choose.choice([self.passes, 1, self.passes + 1])
            self.steps.append(
                [
                    [choose.sample(range(7), choose.choice([1, 2, 4, 7])) for _ in range(size)]
                    for _ in range(passes)
                ]
            )
            self.zeros.append(choose.choice([True, False, None]))


def groups_at_random(seed: int) -> list[list[float | None]]:
    plan = Plan(seed, hvd.size())
    named = {f"p{i}": parameter(0.0) for i in range(7)}
    parameters = list(named.values())
    groups = [[parameters[i] for i in group] for group in plan.groups]
    optimizer = wrap(named, groups=groups, op=plan.op, backward_passes_per_step=plan.passes)
    seen: list[list[float | None]] = []
    for passes, set_to_none in zip(plan.steps, plan.zeros, strict=True):
        for reached in passes:
            push(1.0, *(parameters[i] for i in reached[hvd.rank()]))
        optimizer.step()
        seen.append([None if p.grad is None else p.grad.item() for p in parameters])
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
    return seen


def expected_at_random(seed: int, size: int) -> list[list[float | None]]:
    plan = Plan(seed, size)
    sums: list[int | None] = [None] * 7
    seen: list[list[float | None]] = []
    for passes, set_to_none in zip(plan.steps, plan.zeros, strict=True):
        for index in (index for reached in passes for each in reached for index in each):
            sums[index] = (sums[index] or 0) + 1
        factor = 1.0 if plan.op == hvd.Sum else 1.0 / size
        seen.append([None if each is None else each * factor for each in sums])
        if set_to_none is not None:
            sums = [None if set_to_none or each is None else 0 for each in sums]
    return seen


@pytest.mark.np(2, 4)
def test_random_groups_passes_and_losses(cluster: Cluster) -> None:
    for seed in range(25):
        expected = expected_at_random(seed, cluster.size)
        for seen in cluster.run(groups_at_random, seed):
            assert seen == expected, f"seed {seed}"


def fires_twice_in_a_group(op: int) -> list[float]:
    """A reentrant checkpoint makes a shared weight fire twice, on rank 0 more often."""
    from torch.utils.checkpoint import checkpoint

    w, v = parameter(1.0), parameter(1.0)
    optimizer = wrap({"w": w, "v": v}, op=op, groups=1)
    y = torch.ones(1, requires_grad=True)
    for _ in range(3 if hvd.rank() == 0 else 2):
        y = checkpoint(lambda x: x * w, y, use_reentrant=True)
    (y + v).sum().backward()
    optimizer.step()
    return [w.grad.item(), v.grad.item()]


@pytest.mark.np(2)
@pytest.mark.parametrize(("op", "expected"), [(hvd.Sum, [5.0, 2.0]), (hvd.Average, [2.5, 1.0])])
def test_a_member_may_fire_again_after_the_group_was_launched(
    cluster: Cluster, op: int, expected: list[float]
) -> None:
    assert cluster.run(fires_twice_in_a_group, op) == [expected] * 2


def thrown_half_way() -> list[float]:
    named = {name: parameter(0.0) for name in "abc"}
    a, b, c = named.values()
    optimizer = wrap(named, groups=1)
    optimizer.step()  # the ranks agree, so the next pass launches what is ready

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        (Fails.apply(a) * 1.0 + b * 5.0).sum().backward()
    optimizer.zero_grad()
    push(1.0 + hvd.rank(), a, b, c)
    optimizer.step()
    return [p.grad.item() for p in named.values()]


@pytest.mark.np(2)
def test_a_backward_that_raised_leaves_a_group_usable(cluster: Cluster) -> None:
    assert cluster.run(thrown_half_way) == [[1.5] * 3] * 2


# --- Values ------------------------------------------------------------------------------------


def trained(wrapped: bool, rows: slice, **options: object) -> list[Tensor]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if wrapped:
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)
    x = torch.randn(12, 3, dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        model(x[rows]).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def trained_in_groups(groups: int, factor: float) -> list[Tensor]:
    rows = 12 // hvd.size()
    mine = slice(hvd.rank() * rows, (hvd.rank() + 1) * rows)
    return trained(True, mine, groups=groups, gradient_predivide_factor=factor)


def test_groups_and_predivision_change_no_value(cluster: Cluster) -> None:
    expected = trained(False, slice(None))
    for groups in (1, 2, 4):
        for factor in (1.0, 2.0, float(cluster.size)):
            for got in cluster.run(trained_in_groups, groups, factor):
                for mine, joined in zip(got, expected, strict=True):
                    torch.testing.assert_close(mine, joined, rtol=0, atol=1e-12)


def mixed_and_compressed(compression: str) -> list[object]:
    """A group of two dtypes and an empty tensor, predivided and compressed."""
    a, b = parameter(0.0), parameter(0.0, dtype=torch.float64)
    c = nn.Parameter(torch.zeros(0, 3))
    optimizer = wrap(
        {"a": a, "b": b, "c": c},
        groups=1,
        compression=getattr(hvd.Compression, compression),
        gradient_predivide_factor=2.0,
    )
    (a.sum() * (1.0 + hvd.rank()) + b.sum() * (1.0 + hvd.rank() / 1024) + c.sum()).backward()
    optimizer.step()
    return [a.grad.item(), b.grad.item(), str(b.grad.dtype), list(c.grad.shape)]


@pytest.mark.np(2)
@pytest.mark.parametrize(("compression", "b"), [("none", 1 + 1 / 2048), ("fp16", 1.0)])
def test_a_group_of_several_dtypes(cluster: Cluster, compression: str, b: float) -> None:
    expected = [1.5, b, "torch.float64", [0, 3]]
    assert cluster.run(mixed_and_compressed, compression) == [expected] * 2


def shared_and_added() -> list[float]:
    """Parameters another optimizer brought in, and ones added later, are reduced all the same."""
    a, b, c, d = (parameter(0.0) for _ in range(4))
    first = wrap({"g.a": a, "g.b": b})
    second = wrap({"g.b": b, "g.c": c}, groups=1)
    second.add_param_group({"params": [d]})
    push(1.0 + hvd.rank(), a, b, c, d)
    first.step()
    second.step()
    return [p.grad.item() for p in (a, b, c, d)]


@pytest.mark.np(2)
def test_groups_with_shared_and_added_parameters(cluster: Cluster) -> None:
    assert cluster.run(shared_and_added) == [[1.5] * 4] * 2


# --- Errors ------------------------------------------------------------------------------------


def refused() -> None:
    w, v = parameter(0.0), parameter(0.0)
    sgd = torch.optim.SGD([w, v], lr=0.1)
    for groups, kind, text in (
        (0, ValueError, "positive"),
        (-1, ValueError, "positive"),
        ([["w"]], ValueError, "str"),
        ([w, v], ValueError, "list of lists"),
        ([[w], [v, w]], ValueError, "twice"),
        ([[w, w]], ValueError, "twice"),
        (([w],), TypeError, "tuple"),
        ("ab", TypeError, "str"),
    ):
        with pytest.raises(kind, match=text):
            hvd.DistributedOptimizer(sgd, groups=groups)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="positive"):
        hvd.DistributedOptimizer(sgd, num_groups=-2)
    assert type(sgd) is torch.optim.SGD and not w._backward_hooks


@pytest.mark.np(1, 2)
def test_groups_that_are_refused(cluster: Cluster) -> None:
    cluster.run(refused)


def grouped_differently() -> str:
    named = {f"differ.{name}": parameter(0.0) for name in "abcd"}
    optimizer = wrap(named, groups=1 + hvd.rank())
    with pytest.raises(hvd.HorovodInternalError) as error:
        push(1.0, *list(named.values())[:1])
        optimizer.step()
    return str(error.value)


@pytest.mark.np(2)
def test_ranks_with_different_groups_are_told(cluster: Cluster) -> None:
    first, second = cluster.run(grouped_differently)
    assert first == second
    assert "'differ.c'" in first and "group 0 of groups=" in first and "group 1 of" in first


def sparse_in_a_group(where: str) -> tuple[str, float]:
    """`where`: both ranks' gradient of the table is sparse, or rank 1's, the other being dense or
    absent."""
    table, w = nn.Embedding(3, 1, sparse=True).weight, parameter(0.0)
    optimizer = wrap({f"{where}.table": table, f"{where}.w": w}, groups=1)
    loss = w.sum()
    index = torch.tensor([0, 1])
    if where == "both" or hvd.rank() == 1:
        loss = loss + nn.functional.embedding(index, table, sparse=True).sum()
    elif where == "dense":
        loss = loss + table.sum()
    with pytest.raises(ValueError) as error:
        loss.backward()
    optimizer.zero_grad()
    push(1.0 + hvd.rank(), w, table)  # the job goes on
    optimizer.step()
    assert table.grad.tolist() == [[1.5]] * 3
    return str(error.value), w.grad.item()


@pytest.mark.np(2)
@pytest.mark.parametrize("where", ["both", "dense", "absent"])
def test_a_sparse_gradient_in_a_group_is_refused_on_all_ranks(cluster: Cluster, where: str) -> None:
    (text, gradient), other = cluster.run(sparse_in_a_group, where)
    assert (text, gradient) == other
    assert f"'{where}.table' is sparse on rank" in text and "groups" in text and gradient == 1.5
