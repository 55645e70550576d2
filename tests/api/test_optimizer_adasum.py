"""DistributedOptimizer with op=Adasum: the changes that the ranks' own steps make are combined."""

import copy
import warnings
from typing import Any

import pytest
import torch
from support.cluster import Cluster
from support.gradients import Submissions, parameter, push, wrap
from torch import Tensor, nn

import hvdtorch as hvd

# --- A reference of the formula ----------------------------------------------------------------


def pair(a: Tensor, b: Tensor) -> Tensor:
    dot, aa, bb = (a * b).sum().item(), (a * a).sum().item(), (b * b).sum().item()
    scale_a = 1.0 if aa == 0.0 else 1.0 - dot / (2.0 * aa)
    scale_b = 1.0 if bb == 0.0 else 1.0 - dot / (2.0 * bb)
    return scale_a * a + scale_b * b


def adasum(tensors: list[Tensor]) -> Tensor:
    """Ranks beyond a power of two are combined into the first ones, then neighbours at distance 1,
    2, 4, ..."""
    values = [each.double() for each in tensors]
    power = 1 << (len(values).bit_length() - 1)
    for extra in range(power, len(values)):
        values[extra - power] = pair(values[extra - power], values[extra])
    values = values[:power]
    while len(values) > 1:
        values = [pair(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def test_the_reference() -> None:
    ones, x, y = torch.ones(3), torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert adasum([ones, ones]).tolist() == [1.0] * 3  # parallel: the average
    assert adasum([x, y]).tolist() == [2.0, 3.0]  # orthogonal: the sum
    assert adasum([x, 0 * x]).tolist() == [2.0, 0.0]


# --- Steps -------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "LBFGS": lambda groups: torch.optim.LBFGS(groups, lr=0.5, max_iter=3),
}


class Trainer:
    """A model with two param groups of different lr, trained on one rank's rows."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        torch.manual_seed(6)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        parameters = list(self.model.parameters())
        groups: Any = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]
        self.optimizer = OPTIMIZERS[name](parameters if name == "LBFGS" else groups)
        rows = 24 // size
        self.x = torch.randn(24, 3, dtype=torch.float64)[rank * rows :][:rows]
        self.y = torch.randn(24, 2, dtype=torch.float64)[rank * rows :][:rows]

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(self.x) - self.y).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(self.closure)
        else:
            self.closure()
            self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def trained(name: str) -> tuple[list[Tensor], bool]:
    trainer = Trainer(name, hvd.rank(), hvd.size())
    named = trainer.model.named_parameters()
    before = trainer.optimizer
    trainer.optimizer = hvd.DistributedOptimizer(before, named_parameters=named, op=hvd.Adasum)
    for _ in range(3):
        trainer.step()
    return trainer.values(), trainer.optimizer is before


def expected(name: str, size: int) -> list[Tensor]:
    """The same with one process that plays all ranks."""
    trainers = [Trainer(name, rank, size) for rank in range(size)]
    for _ in range(3):
        starts = trainers[0].values()
        for trainer in trainers:
            trainer.step()
        changed = [trainer.values() for trainer in trainers]
        for index, start in enumerate(starts):
            combined = start + adasum([values[index] - start for values in changed])
            for trainer in trainers:
                with torch.no_grad():
                    list(trainer.model.parameters())[index].copy_(combined)
    return trainers[0].values()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_combines_what_the_ranks_own_steps_change(cluster: Cluster, name: str) -> None:
    reference = expected(name, cluster.size)
    ranks = cluster.run(trained, name)
    for values, same in ranks:
        assert same
        for value, expected_value in zip(values, reference, strict=True):
            torch.testing.assert_close(value, expected_value, rtol=0, atol=1e-10)
    for values, _ in ranks[1:]:  # bit for bit
        assert all(torch.equal(a, b) for a, b in zip(values, ranks[0][0], strict=True))


def one_step(gradients: list[list[float]], options: dict[str, Any]) -> list[float]:
    w = nn.Parameter(torch.ones(len(gradients[0])))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=hvd.Adasum, **options)
    (w * torch.tensor(gradients[hvd.rank()])).sum().backward()
    assert w.tolist() == [1.0] * len(gradients[0])  # valid between backward and step
    optimizer.step()
    return w.tolist()


@pytest.mark.np(2)
def test_parallel_changes_are_averaged_and_orthogonal_ones_added(cluster: Cluster) -> None:
    assert cluster.run(one_step, [[2.0, 0.0], [4.0, 0.0]], {}) == [[-2.0, 1.0]] * 2
    assert cluster.run(one_step, [[2.0, 0.0], [0.0, 4.0]], {}) == [[-1.0, -3.0]] * 2
    fp16 = {"compression": hvd.Compression.fp16}
    assert cluster.run(one_step, [[2.0, 0.0], [0.0, 4.0]], fp16) == [[-1.0, -3.0]] * 2


def scripts_of_all_kinds(kind: str) -> tuple[list[float], list[str]]:
    """Steps as scripts write them; each applies 1 from rank 0 and 2 from rank 1, orthogonal."""
    w = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([w], lr=1.0),
        op=hvd.Adasum,
        backward_passes_per_step=2 if kind == "accumulate" else 1,
    )
    direction = torch.zeros(2)
    direction[hvd.rank()] = 1.0 + hvd.rank()

    def backward(factor: float) -> None:
        (w * direction * factor).sum().backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if kind == "synchronize":
                backward(1.0)
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            elif kind == "accumulate":
                backward(0.5)
                backward(0.5)
                optimizer.step()
            elif kind == "zero":
                backward(7.0)
                optimizer.zero_grad()  # between backward and step
                backward(1.0)
                optimizer.step()
            else:

                def closure() -> float:
                    optimizer.zero_grad()
                    backward(1.0)
                    return 40.0 + hvd.rank()

                assert optimizer.step(closure) == 40.0 + hvd.rank()
            optimizer.zero_grad(set_to_none=False)
    return w.tolist(), [str(each.message) for each in caught]


@pytest.mark.np(2)
@pytest.mark.parametrize("kind", ["synchronize", "accumulate", "zero", "closure"])
def test_every_way_to_write_a_step(cluster: Cluster, kind: str) -> None:
    assert cluster.run(scripts_of_all_kinds, kind) == [([-2.0, -4.0], [])] * 2


def partly_used() -> tuple[list[object], int]:
    a, b, unused = parameter(0.0), parameter(0.0), parameter(1.0)
    sgd = torch.optim.SGD([a, b, unused], lr=1.0, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Adasum)
    push(4.0, a) if hvd.rank() == 0 else push(6.0, b)
    with Submissions() as submissions:
        optimizer.step()
    sent = submissions.gradients()
    optimizer.zero_grad()
    if hvd.rank() == 1:  # rank 0 has nothing to step
        push(1.0, a)
    optimizer.step()
    return [a.item(), b.item(), unused.item(), unused.grad], len(sent)


@pytest.mark.np(2)
def test_parameters_that_only_some_ranks_use(cluster: Cluster) -> None:
    # Momentum is each rank's own: in the second step rank 1 steps a, which has no momentum there.
    assert cluster.run(partly_used) == [([-5.0, -6.0, 1.0, None], 1)] * 2


def sparse_adam() -> list[float]:
    """Rank r looks up row r: orthogonal changes, each of lr."""
    table = nn.Embedding(4, 1, sparse=True)
    nn.init.zeros_(table.weight)
    adam = torch.optim.SparseAdam(table.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(adam, table.named_parameters(), op=hvd.Adasum)
    table(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.step()
    return [round(value, 5) for value in table.weight.flatten().tolist()]


@pytest.mark.np(2)
def test_sparse_gradients(cluster: Cluster) -> None:
    assert cluster.run(sparse_adam) == [[-0.5, -0.5, 0.0, 0.0]] * 2


def in_half(dtype: torch.dtype) -> tuple[list[float], str]:
    w = nn.Parameter(torch.zeros(2, dtype=dtype))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=hvd.Adasum)
    (w * torch.tensor([1.0, 2.0], dtype=dtype)).sum().backward()
    optimizer.step()
    return w.tolist(), str(w.dtype)


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(cluster: Cluster, dtype: torch.dtype) -> None:
    # Equal changes: their average.
    assert cluster.run(in_half, dtype) == [([-1.0, -2.0], str(dtype))] * cluster.size


class CallsBase(torch.optim.SGD):
    """Its step() calls the base class's, which calls the hooks again, and fails when told to."""

    fails = False

    def step(self, closure=None):
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for each in group["params"]:
                    each.mul_(2.0)
        if self.fails:
            raise RuntimeError("told to")
        return result


def nested(fail_first: bool) -> tuple[list[float], int]:
    w = nn.Parameter(torch.ones(2))
    sgd = CallsBase([w], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1)
    optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Adasum)
    (w * torch.tensor([3.0, 3.0])).sum().backward()
    if fail_first:
        sgd.fails = True
        with pytest.raises(RuntimeError, match="told to"):
            optimizer.step()
        sgd.fails = False
        with torch.no_grad():
            w.fill_(1.0)
    with Submissions() as submissions:
        optimizer.step()
    scheduler.step()
    return w.tolist(), len(submissions)


@pytest.mark.np(2)
@pytest.mark.parametrize("fail_first", [False, True])
def test_only_the_outermost_step_counts(cluster: Cluster, fail_first: bool) -> None:
    # (1 - 3) * 2, on both ranks; one announcement and one reduction
    assert cluster.run(nested, fail_first) == [([-4.0, -4.0], 2)] * 2


def kept_apart() -> tuple[list[float], list[float]]:
    """Each rank's momentum is its own; copies, state dicts, added parameters."""
    w, v = parameter(0.0), parameter(0.0)
    sgd = torch.optim.SGD([w], lr=1.0, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, [("w", w), ("v", v)], op=hvd.Adasum)
    optimizer.add_param_group({"params": [v], "lr": 0.5})
    for _ in range(2):
        optimizer.zero_grad()
        push(1.0 + hvd.rank(), w, v)
        optimizer.step()
    momentum = optimizer.state[w]["momentum_buffer"].item()
    plain = copy.deepcopy(optimizer)
    assert type(plain) is torch.optim.SGD
    optimizer.load_state_dict(plain.state_dict())
    return [w.item(), v.item()], [momentum, optimizer.state[v]["momentum_buffer"].item()]


@pytest.mark.np(2)
def test_momentum_stays_with_its_rank(cluster: Cluster) -> None:
    # Parallel changes are averaged: 1.5 and then 1.5 * 1.5.
    values = [-1.5 - 2.25, -0.75 - 1.125]
    assert cluster.run(kept_apart) == [(values, [1.5, 1.5]), (values, [3.0, 3.0])]


def with_a_scaler() -> list[object]:
    """An infinite gradient on rank 1: only rank 0 changes anything, and no rank is waited for."""
    w = parameter(1.0)
    sgd = torch.optim.SGD([w], lr=0.5, fused=True)
    optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen: list[object] = []
    for bad in (True, False):
        optimizer.zero_grad()
        gradient = float("inf") if bad and hvd.rank() == 1 else 1.0
        scaler.scale((w * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), w.item()]
    return seen


@pytest.mark.np(2)
def test_a_scaler_with_a_fused_optimizer(cluster: Cluster) -> None:
    assert cluster.run(with_a_scaler) == [[4.0, 0.5, 4.0, 0.0], [2.0, 0.5, 2.0, 0.0]]


# --- What there is not -------------------------------------------------------------------------


def nothing_is_hooked() -> tuple[int, bool, bool]:
    w = parameter(0.0)
    optimizer = wrap({"w": w}, op=hvd.Adasum, groups=1, sparse_as_dense=True)
    with Submissions() as submissions:
        push(1.0 + hvd.rank(), w)
        optimizer.synchronize()
    local = w.grad.item() == 1.0 + hvd.rank()
    optimizer.step()
    return len(submissions), local, optimizer.op == hvd.Adasum


def test_gradients_stay_local(cluster: Cluster) -> None:
    assert cluster.run(nothing_is_hooked) == [(0, True, True)] * cluster.size


def disagreeing(what: str) -> tuple[str, list[float]]:
    mine = hvd.rank() == 1
    a, b = parameter(1.0), parameter(1.0)
    named = {f"adasum.{what}.a": a, f"adasum.{what}.b": b}
    if what == "count" and mine:
        named.popitem()
    if what == "order" and mine:
        named = dict(reversed(named.items()))
    optimizer = wrap(named, op=hvd.Adasum)
    push(1.0, *named.values())
    with pytest.raises(hvd.HorovodInternalError) as error:
        optimizer.step()
    text = str(error.value)
    values = [a.item(), b.item()]
    healthy = wrap({"healthy": a}, op=hvd.Adasum)
    healthy.step()
    return text, [*values, round(a.item(), 5)]


@pytest.mark.np(2)
@pytest.mark.parametrize("what", ["count", "order"])
def test_ranks_that_wrapped_different_things_are_told_and_unchanged(
    cluster: Cluster, what: str
) -> None:
    (text, values), other = cluster.run(disagreeing, what)
    assert (text, values) == other
    assert values == [1.0, 1.0, 0.9]
    assert f"'adasum.{what}.b'" in text and "on rank 1" in text
