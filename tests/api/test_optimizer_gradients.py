"""DistributedOptimizer: the value of `.grad` when `backward()` returns, whatever each rank did."""

import pytest
import torch
from support.cluster import Cluster
from support.gradients import Submissions, parameter, push, synchronize_and_step, wrap
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import hvdtorch as hvd

# --- The same as one process on the joined batch -----------------------------------------------


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.LayerNorm([4, 6, 6])
        self.body = nn.Sequential(nn.Linear(144, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.conv(images)).tanh().flatten(1)))


def batches(steps: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(4 * size, 1, 6, 6, dtype=torch.float64, generator=generator),
            torch.randint(5, (4 * size,), generator=generator),
        )
        for _ in range(steps)
    ]


def small_net() -> SmallNet:
    torch.manual_seed(3)
    return SmallNet().double()


def trained_on_shards(steps: int) -> list[tuple[Tensor, Tensor]]:
    """(gradient, value) of every parameter after each step on this rank's part of the batch."""
    model = small_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    seen = []
    for images, labels in batches(steps, hvd.size()):
        mine = slice(hvd.rank() * 4, hvd.rank() * 4 + 4)
        optimizer.zero_grad()
        cross_entropy(model(images[mine]), labels[mine]).backward()
        seen += [(p.grad.clone(), p.detach().clone()) for p in model.parameters()]
        optimizer.step()
    return seen


def trained_on_all(steps: int, size: int) -> list[tuple[Tensor, Tensor]]:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    seen = []
    for images, labels in batches(steps, size):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        seen += [(p.grad.clone(), p.detach().clone()) for p in model.parameters()]
        optimizer.step()
    return seen


def test_gradients_equal_those_of_one_process_on_the_joined_batch(cluster: Cluster) -> None:
    expected = trained_on_all(4, cluster.size)
    ranks = cluster.run(trained_on_shards, 4)
    for got in ranks:
        for (gradient, value), (expected_gradient, expected_value) in zip(
            got, expected, strict=True
        ):
            torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)
            torch.testing.assert_close(value, expected_value, rtol=0, atol=1e-12)
    for got in ranks[1:]:  # bit for bit
        assert all(
            torch.equal(a, b)
            for x, y in zip(got, ranks[0], strict=True)
            for a, b in zip(x, y, strict=True)
        )


# --- Parameters that only some ranks use -------------------------------------------------------


def rank_dependent_branch() -> tuple[list, list]:
    a, b, unused = parameter(0.0), parameter(0.0), parameter(1.0)
    sgd = torch.optim.SGD([a, b, unused], lr=0.1, momentum=0.9)
    named = {"a": a, "b": b, "unused": unused}
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named.items())
    push(1.0, unused)
    optimizer.step()
    optimizer.zero_grad()
    push(4.0, a) if hvd.rank() == 0 else push(6.0, b)
    grads = [p.grad if p.grad is None else p.grad.item() for p in named.values()]
    optimizer.step()
    return grads, round(unused.item(), 6)


@pytest.mark.np(2)
def test_a_branch_counts_as_zero_where_it_was_not_taken_and_none_where_by_nobody(
    cluster: Cluster,
) -> None:
    # Zeros instead of None would let momentum move the unused parameter on, to 0.81.
    assert cluster.run(rank_dependent_branch) == [([2.0, 3.0, None], 0.9)] * 2


def loss_of_rank_0_only(explicit: bool) -> list:
    w = parameter(1.0, 2.0)
    optimizer = wrap({"w": w})
    seen = []
    for step in range(3):
        if hvd.rank() == step % hvd.size():
            push(hvd.size(), w)
        synchronize_and_step(optimizer, explicit)
        seen.append(w.grad.tolist())
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("explicit", [False, True])
def test_a_rank_without_any_gradient_takes_part_in_its_step(
    cluster: Cluster, explicit: bool
) -> None:
    assert cluster.run(loss_of_rank_0_only, explicit) == [[[1.0, 1.0]] * 3] * cluster.size


def one_optimizer_per_task() -> list[float]:
    trunk, *heads = (parameter(0.0) for _ in range(hvd.size() + 1))
    optimizers = [wrap({f"head{i}": head}) for i, head in enumerate(heads)] + [
        wrap({"trunk": trunk})
    ]
    for turn in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        push(hvd.size(), trunk, heads[(hvd.rank() + turn) % hvd.size()])
        for optimizer in optimizers:
            optimizer.step()
    return [p.grad.item() for p in (trunk, *heads)]


def test_ranks_may_reach_different_optimizers_in_one_backward(cluster: Cluster) -> None:
    size = cluster.size
    assert cluster.run(one_optimizer_per_task) == [[float(size)] + [1.0] * size] * size


def shuffled_order() -> list[float]:
    named = {f"p{i}": parameter(0.0) for i in range(20)}
    wrapped = wrap(named)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(hvd.rank())).tolist()
    total = torch.zeros((), requires_grad=True)
    for i in order:  # the last one fires first
        total = total * 1.0 + named[f"p{i}"].sum() * (i + hvd.rank())
    total.backward()
    wrapped.step()
    return [p.grad.item() for p in named.values()]


def test_gradients_may_become_ready_in_any_order(cluster: Cluster) -> None:
    mean = sum(range(cluster.size)) / cluster.size
    assert cluster.run(shuffled_order) == [[i + mean for i in range(20)]] * cluster.size


# --- Each gradient is reduced once -------------------------------------------------------------


def clipped(style: str) -> tuple[float, float, list[str]]:
    w = parameter(0.0)
    optimizer = wrap({f"clipped.{style}": w})
    with Submissions() as submissions:
        push(3.0 + 2 * hvd.rank(), w)
        if style != "plain":
            optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_([w], 1.0).item()
        if style == "skip":
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return norm, round(w.grad.item(), 5), submissions.gradients()


@pytest.mark.np(2)
@pytest.mark.filterwarnings("ignore:optimizer.step")
@pytest.mark.parametrize("style", ["plain", "synchronize", "skip"])
def test_clipping_sees_averages_and_each_is_reduced_once(cluster: Cluster, style: str) -> None:
    assert cluster.run(clipped, style) == [(4.0, 1.0, [f"allreduce.clipped.{style}"])] * 2


def reduced_twice(op: int, set_to_none: bool | None) -> tuple[list[float], bool]:
    """Two backward passes, and maybe a zero_grad() between them."""
    w = parameter(0.0, 0.0)
    optimizer = wrap({"w": w}, op=op)
    push(1.0 + hvd.rank(), w)
    first = w.grad
    if set_to_none is not None:
        optimizer.zero_grad(set_to_none=set_to_none)
    push(10.0 + hvd.rank(), w)
    optimizer.step()
    return w.grad.tolist(), w.grad is first


@pytest.mark.np(2)
@pytest.mark.parametrize(
    ("op", "once", "again"), [(hvd.Average, 1.5, 10.5), (hvd.Sum, 3.0, 21.0), (hvd.Max, 2.0, 11.0)]
)
def test_a_second_backward_adds_its_own_reduction(
    cluster: Cluster, op: int, once: float, again: float
) -> None:
    assert cluster.run(reduced_twice, op, None) == [([once + again] * 2, True)] * 2
    assert cluster.run(reduced_twice, op, False) == [([again] * 2, True)] * 2
    assert cluster.run(reduced_twice, op, True) == [([again] * 2, False)] * 2


def second_pass_on_rank_0_only(op: int) -> float:
    w, other = parameter(0.0), parameter(0.0)
    wrapped = wrap({"w": w, "other": other}, op=op)
    push(1.0, w, other)
    push(4.0, w) if hvd.rank() == 0 else push(4.0, other)
    wrapped.step()
    return w.grad.item()


@pytest.mark.np(2)
@pytest.mark.parametrize(("op", "expected"), [(hvd.Average, 1 + 2.0), (hvd.Sum, 2 + 4.0)])
def test_a_second_backward_on_one_rank_only(cluster: Cluster, op: int, expected: float) -> None:
    assert cluster.run(second_pass_on_rank_0_only, op) == [expected] * 2


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (hvd.Sum, [1, 3, 6, 10]),
        (hvd.Min, [1, 1, 1, 1]),
        (hvd.Max, [1, 2, 3, 4]),
        (hvd.Product, [1, 2, 6, 24]),
    ],
)
def test_every_op(cluster: Cluster, op: int, expected: list[int]) -> None:
    assert cluster.run(reduced_by, op) == [float(expected[cluster.size - 1])] * cluster.size


def reduced_by(op: int) -> float:
    w = parameter(0.0)
    wrapped = wrap({"w": w}, op=op)
    push(1.0 + hvd.rank(), w)
    wrapped.step()
    return w.grad.item()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3, bias=False)
        self.own = nn.Linear(3, 3)

    def block(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x)).tanh()

    def forward(self, x: Tensor, reentrant: bool | None, blocks: int) -> Tensor:
        for _ in range(blocks):
            x = (
                self.block(x)
                if reentrant is None
                else checkpoint(self.block, x, use_reentrant=reentrant)
            )
        return self.shared(x)  # fires before the checkpoints do, in the outer pass


def checkpointed(
    reentrant: bool | None, op: int, size: int, rank: int, blocks: int
) -> list[Tensor]:
    torch.manual_seed(1)
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if reentrant is not None:
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, op=op)
    x = torch.linspace(-1, 1, 6 * size, dtype=torch.float64).view(size, 2, 3).requires_grad_()
    rows = x if reentrant is None else x[rank]
    for _ in range(2):  # the second one on top of the first one's gradients
        model(rows, reentrant, blocks).sum().backward()
    return [p.grad for p in model.parameters()]


def checkpointed_here(reentrant: bool, op: int, vary: bool) -> list[Tensor]:
    blocks = 3 + (hvd.rank() if vary else 0)
    return checkpointed(reentrant, op, hvd.size(), hvd.rank(), blocks)


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_activation_checkpoints_with_shared_weights(
    cluster: Cluster, reentrant: bool, op: int
) -> None:
    size = cluster.size
    expected = checkpointed(None, op, size, 0, 3)
    for gradients in cluster.run(checkpointed_here, reentrant, op, False):
        for gradient, joined in zip(gradients, expected, strict=True):
            reference = joined / size if op == hvd.Average else joined
            torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)
    first, *others = cluster.run(checkpointed_here, reentrant, op, True)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def fires_twice_on_rank_0_only(op: int, passes: int) -> float:
    w, seed = parameter(1.0), torch.ones(1, requires_grad=True)
    wrapped = wrap({"w": w}, op=op, backward_passes_per_step=passes)
    for _ in range(passes):
        y = checkpoint(lambda x: x * w, seed, use_reentrant=True)
        if hvd.rank() == 0:
            y = checkpoint(lambda x: x * w, y, use_reentrant=True)
        y.sum().backward()
    wrapped.step()
    return w.grad.item()


@pytest.mark.np(2)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_parameter_may_fire_twice_on_one_rank_and_once_on_another(
    cluster: Cluster, passes: int
) -> None:
    assert cluster.run(fires_twice_on_rank_0_only, hvd.Sum, passes) == [3.0 * passes] * 2
    assert cluster.run(fires_twice_on_rank_0_only, hvd.Average, passes) == [1.5 * passes] * 2


def second_order() -> tuple[float, float]:
    w = parameter(2.0)
    wrapped = wrap({"w": w})
    ((hvd.rank() + 1) * w**3).sum().backward(create_graph=True)  # (r + 1) * 3 w^2
    average = w.grad.item()
    (curvature,) = torch.autograd.grad(w.grad.sum(), w)  # this rank's: (r + 1) * 6 w
    w.grad = None  # break the cycle that create_graph makes
    del wrapped
    return average, curvature.item()


@pytest.mark.np(2)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_gives_averages_and_keeps_the_local_graph(cluster: Cluster) -> None:
    assert cluster.run(second_order) == [(18.0, 12.0), (18.0, 24.0)]


def after_a_gradient_that_is_returned(op: int) -> tuple[list[float], list[float]]:
    w = parameter(1.0)
    wrapped = wrap({"w": w}, op=op)
    push(1.0 + hvd.rank(), w)
    torch.autograd.grad(w.sum(), w)
    kept = w.grad.tolist()
    (w * (1.0 + hvd.rank())).sum().backward(inputs=[w])
    del wrapped
    return kept, w.grad.tolist()


@pytest.mark.np(2)
def test_autograd_grad_leaves_reduced_gradients_alone(cluster: Cluster) -> None:
    assert cluster.run(after_a_gradient_that_is_returned, hvd.Sum) == [([3.0], [6.0])] * 2
    assert cluster.run(after_a_gradient_that_is_returned, hvd.Average) == [([1.5], [3.0])] * 2


def assigned_by_hand(op: int, explicit: bool) -> list[float]:
    """The gradients after a step() on assigned ones, one more step() on the same ones, and a step()
    on gradients that rank 0 alone has assigned."""
    w, v = parameter(1.0), parameter(1.0)
    wrapped = wrap({"w": w, "v": v}, op=op)
    push(1.0, w, v)  # so that there is something reduced to tell from what is assigned
    wrapped.step()
    (gradient,) = torch.autograd.grad((w * (hvd.rank() + 1)).sum(), w)
    w.grad, v.grad = gradient, None
    if explicit:
        wrapped.synchronize()
        with wrapped.skip_synchronize():
            wrapped.step()
    else:
        wrapped.step()
    seen = [w.grad.item()]
    assert v.grad is None
    wrapped.step()
    seen.append(w.grad.item())
    w.grad = torch.full((1,), 6.0) if hvd.rank() == 0 else None
    wrapped.step()
    return [*seen, w.grad.item(), round(w.item(), 5)]


@pytest.mark.np(2)
@pytest.mark.parametrize("explicit", [False, True])
def test_gradients_assigned_by_hand_are_reduced_once_by_the_step(
    cluster: Cluster, explicit: bool
) -> None:
    # 1 and 2; w loses a tenth of 1, 1.5, 1.5 and 3
    assert cluster.run(assigned_by_hand, hvd.Average, explicit) == [[1.5, 1.5, 3.0, 0.3]] * 2
    assert cluster.run(assigned_by_hand, hvd.Sum, explicit) == [[3.0, 3.0, 6.0, -0.4]] * 2


# --- Ranges, dtypes, compression ---------------------------------------------------------------


def half_precision(value: float, op: int, dtype: torch.dtype) -> float:
    w = parameter(0.0, dtype=dtype)
    wrapped = wrap({"w": w}, op=op)
    push(value, w)
    wrapped.step()
    return w.grad.item()


@pytest.mark.np(2)
@pytest.mark.parametrize(
    ("value", "op", "expected"),
    [
        (40000.0, hvd.Average, 40000.0),
        (40000.0, hvd.Sum, float("inf")),
        (2.0**-24, hvd.Average, 2.0**-24),
    ],
)
def test_fp16_keeps_its_range(cluster: Cluster, value: float, op: int, expected: float) -> None:
    assert cluster.run(half_precision, value, op, torch.float16) == [expected] * 2


def predivided(factor: float) -> list[float]:
    w = parameter(0.0, 0.0)
    wrapped = wrap({"w": w}, gradient_predivide_factor=factor)
    (w * torch.tensor([1.0 + hvd.rank(), 0.25])).sum().backward()
    wrapped.step()
    return w.grad.tolist()


@pytest.mark.np(2, 4)
def test_predivide_changes_no_average(cluster: Cluster) -> None:
    for factor in (1.0, 2.0, float(cluster.size)):  # powers of two: exact
        mean = (1 + cluster.size) / 2
        assert cluster.run(predivided, factor) == [[mean, 0.25]] * cluster.size


class Doubling:
    """A compressor of the user's own: neither of hvdtorch's classes nor the same tensor."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, float]:
        return tensor * 2, 0.5

    @staticmethod
    def decompress(tensor: Tensor, context: float) -> Tensor:
        return tensor * context


def compressed(compressor: str) -> tuple[float, str, bool, list[str]]:
    known = {"fp16": hvd.Compression.fp16, "bf16": hvd.Compression.bf16, "own": Doubling}
    w, other = parameter(0.0), parameter(0.0)
    optimizer = wrap({"w": w, "other": other}, compression=known[compressor])
    w.grad = given = torch.zeros(1)
    wires = []
    push(1.0 + hvd.rank() / 1024, w)
    push(0.0, other)
    wires.append(str(w.grad.dtype))
    optimizer.step()
    return w.grad.item(), wires[0], w.grad is given


@pytest.mark.np(2)
@pytest.mark.parametrize(
    ("compressor", "expected"),
    [("fp16", 1.0), ("bf16", 1.0), ("own", 1.00048828125)],
)
def test_compression(cluster: Cluster, compressor: str, expected: float) -> None:
    # 1 + 1/1024 is exact in fp16 but the mean 1 + 1/2048 is not: it rounds to even. bf16 has
    # neither.
    assert cluster.run(compressed, compressor) == [(expected, "torch.float32", True)] * 2
