"""DistributedOptimizer: several optimizers, parameters that come and go."""

import pytest
import torch
from support.cluster import Cluster
from support.gradients import Submissions, parameter, push, wrap
from torch import Tensor, nn

import hvdtorch as hvd


def gan(shards: int, wrapped: bool) -> list[Tensor]:
    """Generator and discriminator, whose parameters have the same names; two steps."""
    torch.manual_seed(5)
    g, d = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    g_optimizer = torch.optim.SGD(g.parameters(), lr=0.5)
    d_optimizer = torch.optim.SGD(d.parameters(), lr=0.5)
    noise = torch.randn(2, 4, 2, dtype=torch.float64)
    if wrapped:
        g_optimizer = hvd.DistributedOptimizer(g_optimizer, named_parameters=g.named_parameters())
        d_optimizer = hvd.DistributedOptimizer(d_optimizer, named_parameters=d.named_parameters())
        noise = noise[:, hvd.rank() * (4 // shards) :][:, : 4 // shards]
    for batch in noise:
        g_optimizer.zero_grad()
        d_optimizer.zero_grad()
        fake = d(g(batch))
        d_loss, g_loss = fake.sigmoid().mean(), -fake.mean()
        d_loss.backward(retain_graph=True)
        g_loss.backward()  # reaches the discriminator as well
        d_optimizer.step()
        g_optimizer.step()
    return [*g.parameters(), *d.parameters()]


def wrapped_gan() -> list[Tensor]:
    return [p.detach() for p in gan(hvd.size(), wrapped=True)]


@pytest.mark.np(1, 2, 4)
def test_two_optimizers_with_the_same_parameter_names(cluster: Cluster) -> None:
    expected = gan(1, wrapped=False)
    for got in cluster.run(wrapped_gan):
        for mine, joined in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, joined.detach(), rtol=0, atol=1e-12)


def toggled_discriminator() -> tuple[list, list]:
    g, d = parameter(1.0), parameter(1.0)
    optimizers = [wrap({"toggled.w": g}), wrap({"toggled.w": d})]
    scale = 1.0 + hvd.rank()
    d.requires_grad_(False)
    (g * d * scale).sum().backward()
    first = [g.grad.item(), d.grad]
    d.requires_grad_(True)
    (g.detach() * d * scale).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return first, [g.grad.item(), d.grad.item()]


@pytest.mark.np(2)
def test_requires_grad_may_be_toggled(cluster: Cluster) -> None:
    assert cluster.run(toggled_discriminator) == [([1.5, None], [1.5, 1.5])] * 2


def frozen_at_wrap_time() -> list:
    trained, frozen = parameter(1.0), parameter(1.0)
    frozen.requires_grad_(False)
    optimizer = wrap({"trained": trained, "frozen": frozen})
    (trained * frozen * (1.0 + hvd.rank())).sum().backward()
    optimizer.step()
    seen = [trained.grad.item(), frozen.grad, frozen.item()]
    frozen.requires_grad_(True)
    optimizer.zero_grad()
    (frozen * (1.0 + hvd.rank())).sum().backward()
    optimizer.step()
    return [*seen, frozen.grad.item()]


@pytest.mark.np(2)
def test_a_frozen_parameter_is_left_alone_until_it_is_thawed(cluster: Cluster) -> None:
    assert cluster.run(frozen_at_wrap_time) == [[1.5, None, 1.0, 1.5]] * 2


def overlapping(op: int) -> tuple[list[float], list[str]]:
    a, b, c = parameter(0.0), parameter(0.0), parameter(0.0)
    first = wrap({"overlap.a": a, "overlap.b": b}, op=op)
    second = wrap({"overlap.b": b, "overlap.c": c}, op=op)
    seen = []
    for epoch in range(4):
        optimizer = (first, second)[epoch % 2]
        first.zero_grad()
        second.zero_grad()
        with Submissions() as submissions:
            push(1.0 + hvd.rank(), a, b, c)
            optimizer.step()
        seen.append(submissions.gradients())
    return [p.grad.item() for p in (a, b, c)] + [round(b.item(), 5)], seen


@pytest.mark.np(2)
@pytest.mark.parametrize(("op", "gradient"), [(hvd.Average, 1.5), (hvd.Sum, 3.0)])
def test_a_parameter_of_two_optimizers_is_reduced_once(
    cluster: Cluster, op: int, gradient: float
) -> None:
    for values, names in cluster.run(overlapping, op):
        assert values == [gradient] * 3 + [round(-0.1 * gradient * 4, 5)]
        assert all(len(each) == 3 for each in names)


def conflicting() -> str:
    w = parameter(0.0)
    first = wrap({"conflict.w": w}, op=hvd.Sum)
    with pytest.raises(ValueError) as error:
        wrap({"mine": w}, op=hvd.Average)
    del first
    wrap({"mine": w}, op=hvd.Average)  # nobody uses the other one any more
    return str(error.value)


@pytest.mark.np(2)
def test_a_parameter_cannot_be_reduced_in_two_ways(cluster: Cluster) -> None:
    for text in cluster.run(conflicting):
        assert "'mine'" in text and "op=Sum" in text and "op=Average" in text
        assert text.count("the SGD optimizer at") == 2


def discarded() -> tuple[int, list[float]]:
    w = parameter(0.0)
    optimizer = wrap({"w": w})
    push(1.0 + hvd.rank(), w)
    del optimizer
    w.grad = None
    with Submissions() as submissions:
        push(1.0 + hvd.rank(), w)
    return len(submissions), w.grad.tolist()


@pytest.mark.np(2)
def test_a_discarded_optimizer_leaves_no_hooks(cluster: Cluster) -> None:
    assert cluster.run(discarded) == [(0, [1.0]), (0, [2.0])]


def discarded_on_one_rank_first() -> float:
    """What is garbage on one rank is not collected yet on the other; the ranks must not care."""
    kept, w = parameter(0.0), parameter(0.0)
    optimizer, other = wrap({"w": w}), wrap({"kept": kept})
    loop = [optimizer]
    if hvd.rank() == 0:
        loop.append(loop)
    del optimizer, loop
    for _ in range(2):
        push(1.0 + hvd.rank(), kept)
        other.step()
        other.zero_grad()
    again = wrap({"w": w}, op=hvd.Sum)
    push(1.0 + hvd.rank(), w)
    again.step()
    return w.grad.item()


@pytest.mark.np(2)
def test_ranks_may_collect_a_discarded_optimizer_at_different_times(cluster: Cluster) -> None:
    assert cluster.run(discarded_on_one_rank_first) == [3.0, 3.0]


def after_a_new_start() -> list[float]:
    w, v = parameter(0.0), parameter(0.0)
    optimizer = wrap({"restart.w": w}, backward_passes_per_step=2)
    push(1.0 + hvd.rank(), w)
    hvd.shutdown()
    hvd.init()
    w.grad = None
    another = wrap({"restart.w": v})
    for _ in range(2):  # what was accumulated before counts no more
        push(1.0 + hvd.rank(), w, v)
    optimizer.step()
    another.step()
    return [w.grad.item(), v.grad.item()]


@pytest.mark.np(1, 2)
def test_an_optimizer_outlives_shutdown_and_init(cluster: Cluster) -> None:
    mean = (1 + cluster.size) / 2
    assert cluster.run(after_a_new_start) == [[2 * mean, 2 * mean]] * cluster.size
