"""DistributedOptimizer: every torch.optim class, closures, and gradient scaling."""

import copy

import pytest
import torch
from support.cluster import Cluster
from support.gradients import parameter, push, wrap
from torch import Tensor, nn

import hvdtorch as hvd

OPTIMIZERS: dict[str, dict[str, object]] = {
    "ASGD": {},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adamax": {},
    "LBFGS": {"max_iter": 3},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


def test_every_optimizer_of_torch_is_listed() -> None:
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    # Needs sparse gradients, and the base class.
    assert classes - {"SparseAdam", "Optimizer"} == set(OPTIMIZERS)


def trained(name: str, shard: slice | None) -> list[Tensor]:
    """Three steps of a linear model on all rows, or on a shard of them."""
    torch.manual_seed(2)
    model = nn.Linear(3, 2, bias=name != "Muon").double()  # Muon takes matrices only
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, **OPTIMIZERS[name])
    if shard is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        x, y = x[shard], y[shard]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return hvd.allreduce(loss.detach()) if shard is not None else loss

    for _ in range(3):
        optimizer.step(closure)
    if name != "LBFGS":
        for _ in range(2):
            closure()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def trained_on_shard(name: str) -> list[Tensor]:
    rows = 12 // hvd.size()
    return trained(name, slice(hvd.rank() * rows, (hvd.rank() + 1) * rows))


@pytest.mark.np(1, 2, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_of_one_process_on_the_joined_batch(cluster: Cluster, name: str) -> None:
    expected = trained(name, None)
    for got in cluster.run(trained_on_shard, name):
        for mine, joined in zip(got, expected, strict=True):
            # Muon computes in bfloat16.
            tolerance = 1e-2 if name == "Muon" else 1e-9
            torch.testing.assert_close(mine, joined, rtol=0, atol=tolerance)


def closure_returns() -> tuple[float, float]:
    w = parameter(1.0)
    optimizer = wrap({"w": w})

    def closure() -> float:
        optimizer.zero_grad()
        push(1.0 + hvd.rank(), w)
        optimizer.synchronize()
        return 40.0 + hvd.rank()

    value = optimizer.step(closure=closure)
    return value - hvd.rank(), round(w.item(), 5)


@pytest.mark.np(2)
def test_gradients_of_a_closure_are_reduced_and_its_value_returned(cluster: Cluster) -> None:
    assert cluster.run(closure_returns) == [(40.0, 0.85)] * 2


def scaled(order: str, fused: bool) -> list[object]:
    """One step with an infinite gradient on rank 1, one with finite gradients."""
    w = parameter(1.0)
    optimizer = torch.optim.SGD([w], lr=0.5, fused=fused)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("w", w)])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen: list[object] = []
    for bad in (True, False):
        optimizer.zero_grad()
        gradient = float("inf") if bad and hvd.rank() == 1 else 1.0 + hvd.rank()
        scaler.scale((w * gradient).sum()).backward()
        if order == "synchronize":
            optimizer.synchronize()
        if order != "step":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([w], 100.0)
        if order == "synchronize":
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), round(w.item(), 5)]
    return seen


@pytest.mark.np(2)
@pytest.mark.parametrize("order", ["step", "unscale", "synchronize"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_infinite_gradient_on_one_rank_makes_all_skip(
    cluster: Cluster, order: str, fused: bool
) -> None:
    assert cluster.run(scaled, order, fused) == [[2.0, 1.0, 2.0, 0.25]] * 2


def broadcast_state(kind: str) -> tuple[float, object, dict]:
    """Rank 0 holds a state from one real step, the others are fresh."""
    w = parameter(1.0)
    if kind == "AdamW":
        optimizer = torch.optim.AdamW([w], lr=0.1, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.5)
    if hvd.rank() == 0:
        w.grad = torch.ones(1)
        optimizer.step()
        optimizer.zero_grad()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("w", w)])
    hvd.broadcast_parameters([("w", w)], root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return w.item(), w.grad, copy.deepcopy(optimizer.state_dict())


@pytest.mark.np(2)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_broadcasting_the_state_of_a_wrapped_optimizer_trains_nothing(
    cluster: Cluster, kind: str
) -> None:
    root, *others = cluster.run(broadcast_state, kind)
    assert root[1] is None and root[2]["state"]
    assert root[2]["param_groups"][0].get("momentum", 0.9) == 0.9
    assert others == [root]
