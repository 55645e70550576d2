"""broadcast_optimizer_state: every optimizer, fresh or used, without a step being run."""

import collections
from typing import Any

import pytest
import torch
from support.checks import same

import hvdtorch as hvd


def parameter(value: float = 1.0, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape or (2, 3), value))


def step(optimizer: torch.optim.Optimizer, gradient: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, gradient)
    optimizer.step(lambda: torch.tensor(1.0) if isinstance(optimizer, torch.optim.LBFGS) else None)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """A nested structure as path -> leaf, tensors as (dtype, shape, values)."""
    if isinstance(value, torch.Tensor):
        return {path: (str(value.dtype), tuple(value.shape), value.tolist())}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {path: value}
    return {k: v for key, item in items for k, v in flat(item, f"{path}/{key}").items()}


CLASSES = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def only_root_has_state(case: str, root: int) -> dict[str, Any]:
    """The root steps `1`, the others are fresh, or have stepped elsewhere; then all are equal."""
    rank = hvd.rank()
    parameters = [parameter(), parameter(2.0, 4)]
    optimizer = CLASSES[case](parameters)
    if rank == root or rank % 3 == 2:
        step(optimizer, 1.0 if rank == root else 5.0)
    for group in optimizer.param_groups:
        if rank != root and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = 77.0
    hvd.broadcast_parameters(parameters, root)
    for p in parameters:
        p.grad = None
    weights = [p.detach().clone() for p in parameters]
    hvd.broadcast_optimizer_state(optimizer, root)
    for p, weight in zip(parameters, weights, strict=True):
        same(p, weight)
        assert p.grad is None
    state = flat(optimizer.state_dict())
    step(optimizer, 0.5)
    return {"state": state, "weights": flat([p.detach() for p in parameters])}


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("case", CLASSES)
def test_state_of_every_class_equals_the_roots(cluster, case):
    for root in (0, cluster.size - 1):
        results = cluster.run(only_root_has_state, case, root)
        for result in results:
            assert result == results[root]


def broadcast_is_no_step() -> None:
    rank = hvd.rank()
    weight = parameter(1.0, 1)
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1)
    if rank == 0:
        step(optimizer)
        weight.grad = None
    hvd.broadcast_parameters([weight], 0)
    before = weight.detach().clone()
    hvd.broadcast_optimizer_state(optimizer, 0)
    same(weight, before)
    assert weight.grad is None
    state = optimizer.state[weight]
    assert state["step"].item() == 1.0 and state["exp_avg"].item() == hvd.broadcast_object(
        state["exp_avg"].item()
    )
    momentum = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.5)
    if rank == 0:
        step(momentum)
    hvd.broadcast_parameters([weight], 0)
    hvd.broadcast_optimizer_state(momentum, 0)
    buffer = momentum.state[weight]["momentum_buffer"]
    same(buffer, hvd.broadcast(buffer, 0))
    assert buffer.item() != 0.5


@pytest.mark.np(2)
def test_nothing_is_trained(cluster):
    cluster.run(broadcast_is_no_step)


def fresh_adam() -> None:
    weight = parameter(1.0, 1)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert not optimizer.state
    step(optimizer)
    assert abs(weight.item() - 0.9) < 1e-6  # 0.1 down; a step counted before makes it 0.0744


@pytest.mark.np(2)
def test_a_fresh_optimizer_stays_fresh(cluster):
    cluster.run(fresh_adam)


def frozen_and_unused() -> None:
    rank = hvd.rank()
    a, b, c = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    b.requires_grad_(False)
    kept = b.weight.detach().clone()
    optimizer = torch.optim.Adam([*a.parameters(), *b.parameters(), *c.parameters()], lr=0.1)
    layers = [a, c] if rank == 0 else [a]  # c has no gradient yet on the other rank
    sum(layer(torch.ones(1, 2)).sum() for layer in layers).backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert set(optimizer.state) == {*a.parameters(), *c.parameters()}
    same(b.weight, kept)
    for p, state in optimizer.state.items():
        assert state["step"].item() == 1.0
        same(state["exp_avg"], hvd.broadcast(state["exp_avg"], 0))
        assert state["exp_avg"].shape == p.shape
    # The other way round: what only this rank had is gone.
    if rank == 1:
        step(optimizer)
        optimizer.state[b.weight] = {"stray": torch.ones(1)}
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert b.weight not in optimizer.state


@pytest.mark.np(2)
def test_frozen_and_unused_parameters(cluster):
    cluster.run(frozen_and_unused)


def options_without_state() -> None:
    rank = hvd.rank()
    groups = [
        {"params": [parameter()], "lr": 1.0 + rank, "momentum": 0.5 * rank},
        {"params": [parameter(), parameter()], "lr": 10.0 + rank, "nesterov": False},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.1 * rank)
    kept = optimizer.param_groups[0]
    hvd.broadcast_optimizer_state(optimizer, hvd.size() - 1)
    last = hvd.size() - 1
    assert optimizer.param_groups[0] is kept
    assert [g["lr"] for g in optimizer.param_groups] == [1.0 + last, 10.0 + last]
    assert [g["momentum"] for g in optimizer.param_groups] == [0.5 * last, 0]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1 * last] * 2
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 2]
    betas = (0.5 + rank / 100, 0.9)
    adam = torch.optim.Adam([parameter()], lr=torch.tensor(0.25 * (rank + 1)), betas=betas)
    lr = adam.param_groups[0]["lr"]
    hvd.broadcast_optimizer_state(adam, 0)
    assert adam.param_groups[0]["lr"] is lr  # a scheduler may hold it
    same(lr, torch.tensor(0.25))
    assert adam.param_groups[0]["betas"] == (0.5, 0.9)


def test_options_travel_even_without_state(cluster):
    cluster.run(options_without_state)


def existing_tensors_are_filled() -> None:
    weight = parameter(1.0, 5)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    step(optimizer, 1.0 + hvd.rank())
    entry = optimizer.state[weight]
    before = dict(entry)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.state[weight] is entry
    for key, tensor in before.items():
        assert entry[key] is tensor
        same(tensor, hvd.broadcast(tensor, 0))


def test_matching_tensors_are_overwritten_in_place(cluster):
    cluster.run(existing_tensors_are_filled)


Point = collections.namedtuple("Point", "x y")


class Nested(torch.optim.Optimizer):
    """State of every shape a user may come up with."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 1.0, "options": {"deep": [torch.zeros(1)]}})

    def fill(self, value: float) -> None:
        (weight,) = self.param_groups[0]["params"]
        tensor = torch.full((2,), value)
        self.param_groups[0]["options"] = {"deep": [torch.full((1,), value), (None, value)]}
        self.state[weight] = {
            "list": [None, tensor, {"x": torch.tensor(value, dtype=torch.bfloat16)}, "s"],
            "tuple": (1, (tensor * 2,), Point(value, tensor * 3)),
            "alias": tensor,
            "weight": weight,
            "sparse": torch.eye(2).mul(value).to_sparse(),
            "wide": torch.tensor([value]).expand(4),
            "last": torch.full((1, 2, 3, 3), value).to(memory_format=torch.channels_last),
            "bool": torch.tensor([value > 0]),
            "ordered": collections.OrderedDict(b=1, a=torch.tensor([1j * value])),
        }
        self.state["global"] = {"count": int(value), "total": torch.tensor(int(value))}


def nested_state() -> None:
    weight = parameter(float(hvd.rank()), 2)
    optimizer = Nested([weight])
    if hvd.rank() == 0:
        optimizer.fill(3.0)
    elif hvd.rank() == 2:
        optimizer.fill(-1.0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    same(weight, torch.full((2,), float(hvd.rank())))
    state = optimizer.state[weight]
    assert state["weight"] is weight
    same(state["list"][1], torch.full((2,), 3.0))
    assert state["alias"] is state["list"][1]
    same(state["list"][2]["x"], torch.tensor(3.0, dtype=torch.bfloat16))
    assert state["list"][0] is None and state["list"][3] == "s"
    same(state["tuple"][1][0], torch.full((2,), 6.0))
    assert type(state["tuple"][2]) is Point and state["tuple"][2].x == 3.0
    same(state["tuple"][2].y, torch.full((2,), 9.0))
    same(state["sparse"].to_dense(), torch.eye(2) * 3)
    same(state["wide"], torch.full((4,), 3.0))
    same(state["last"], torch.full((1, 2, 3, 3), 3.0))
    assert state["last"].is_contiguous(memory_format=torch.channels_last)
    same(state["bool"], torch.tensor([True]))
    assert list(state["ordered"]) == ["b", "a"]
    same(state["ordered"]["a"], torch.tensor([3j]))
    assert optimizer.state["global"]["count"] == 3
    same(optimizer.state["global"]["total"], torch.tensor(3))
    same(optimizer.param_groups[0]["options"]["deep"][0], torch.tensor([3.0]))
    assert optimizer.param_groups[0]["options"]["deep"][1] == (None, 3.0)


def test_nested_state(cluster):
    cluster.run(nested_state)


def sparse_adam() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    if hvd.rank() == 0:
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0, model=table)
    state = optimizer.state[table.weight]
    assert state["step"] == 1
    same(state["exp_avg"], hvd.broadcast(state["exp_avg"], 0))


def test_sparse_adam(cluster):
    cluster.run(sparse_adam)


def different_optimizers(case: str) -> str:
    odd = hvd.rank() > 0
    if case == "groups":
        groups = [{"params": [parameter()]}, {"params": [parameter()]}]
        if odd:
            groups = [{"params": [parameter(), parameter()]}]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.1)
    elif case == "count":
        optimizer = torch.optim.SGD([parameter()] * 1 + [parameter()] * odd, lr=0.1)
    else:
        optimizer = (torch.optim.Adam if odd else torch.optim.SGD)([parameter()], lr=0.1)
    with pytest.raises(ValueError) as caught:
        hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.barrier()
    return str(caught.value)


@pytest.mark.np(2, 3)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("groups", ("[1, 1] parameters on ranks [0]", "[2] parameters on ranks [1")),
        ("count", ("[1] parameters on ranks [0]", "[2] parameters on ranks [1")),
        ("class", ("SGD", "Adam")),
    ],
)
def test_different_optimizers_are_the_same_error_on_all_ranks(cluster, case, words):
    texts = cluster.run(different_optimizers, case)
    assert len(set(texts)) == 1, texts
    for word in words:
        assert word in texts[0], texts[0]


class Stubborn:
    def __reduce__(self):
        raise TypeError("not to be pickled")


def unpicklable_state() -> str:
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1 + hvd.rank())
    optimizer.state[weight] = {"stubborn": Stubborn() if hvd.rank() == 0 else None}
    with pytest.raises(RuntimeError) as caught:
        hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1 + hvd.rank()  # nothing was changed
    hvd.barrier()
    return str(caught.value)


def test_state_that_cannot_be_pickled_is_an_error_on_all_ranks(cluster):
    texts = cluster.run(unpicklable_state)
    assert set(texts) == {texts[0]} and "rank 0: TypeError: not to be pickled" in texts[0]


def wrapped() -> None:
    weight = parameter()
    plain = torch.optim.Adam([weight], lr=0.1 * (hvd.rank() + 1))
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=[("weight", weight)])
    if hvd.rank() == 0:
        weight.grad = torch.ones_like(weight)
        with optimizer.skip_synchronize():
            optimizer.step()
        weight.grad = None
    hvd.broadcast_parameters([weight], 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state[weight]["step"].item() == 1.0
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    same(weight, hvd.broadcast(weight.detach(), 0))
    assert optimizer.state[weight]["step"].item() == 2.0


def test_a_wrapped_optimizer(cluster):
    cluster.run(wrapped)
