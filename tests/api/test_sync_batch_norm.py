"""SyncBatchNorm: on all ranks what torch's BatchNorm does with the ranks' batches in one."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hvdtorch as hvd

PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
COUNTS = ((3, 3, 3, 3), (3, 0, 5, 1), (2, 0, 0, 0), (2, 4, 0, 0))  # rows of the ranks


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def part_of(joint: Tensor, counts: tuple[int, ...]) -> Tensor:
    """This rank's rows."""
    rank = hvd.rank()
    return joint[sum(counts[:rank]) : sum(counts[: rank + 1])]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same on every rank; channels differ in mean and spread."""
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    scale = torch.arange(1, shape[1] + 1).view(-1, *[1] * (len(shape) - 2))
    return (values * scale + 3 * scale).to(dtype)


def pair_of_layers(dims: int, **options: Any) -> tuple[nn.Module, hvd.SyncBatchNorm]:
    """Torch's layer and ours, float64, with the same weights."""
    plain = PLAIN[dims](4, **options).double()
    if plain.affine:
        nn.init.uniform_(plain.weight, 0.5, 1.5)
        nn.init.uniform_(plain.bias)
        hvd.broadcast_parameters(plain.state_dict(), 0)
    return plain, hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))


def step(plain: nn.Module, synced: nn.Module, joint: Tensor, counts: tuple[int, ...]) -> None:
    """One forward and backward pass through both, compared."""
    whole = joint.detach().clone().requires_grad_()
    mine = part_of(joint, counts).detach().clone().requires_grad_()
    factors = random(*joint.shape, seed=99)
    plain.zero_grad()
    synced.zero_grad()
    expected = plain(whole)
    (expected * factors).sum().backward()
    actual = synced(mine)
    (actual * part_of(factors, counts)).sum().backward()
    close(actual, part_of(expected, counts))
    close(mine.grad, part_of(whole.grad, counts))
    for ours, theirs in zip(synced.parameters(), plain.parameters(), strict=True):
        close(hvd.allreduce(ours.grad, op=hvd.Sum), theirs.grad, 1e-11)
    for (name, ours), theirs in zip(synced.named_buffers(), plain.buffers(), strict=True):
        close(ours, theirs)
        same(hvd.broadcast(ours, 0, name=name), ours)  # the same bits on all ranks


def equals_the_joint_batch(options: dict[str, Any]) -> None:
    for shape in ((4,), (4, 5), (4, 3, 2), (4, 2, 3, 2)):
        for counts in COUNTS:
            counts = counts[: hvd.size()]
            plain, synced = pair_of_layers(len(shape) + 1, **options)
            for seed in range(2):
                step(plain, synced, random(sum(counts), *shape, seed=seed), counts)
            plain.eval()
            synced.eval()
            step(plain, synced, random(sum(counts), *shape, seed=7), counts)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"momentum": 0.3, "eps": 0.5},
        {"affine": False},
        {"track_running_stats": False},
    ],
    ids=str,
)
def test_equals_batch_norm_of_the_joint_batch(cluster, options):
    cluster.run(equals_the_joint_batch, options)


def narrow_floats() -> None:
    size = hvd.size()
    for dtype in (torch.bfloat16, torch.float16):
        # 4 x 1000 values around 100: a sum in the dtype itself would stop growing or overflow.
        whole = (100 + random(4 * size, 3, 1000, dtype=torch.float32)).to(dtype)
        mine = part_of(whole, (4,) * size).requires_grad_()
        plain, synced = nn.BatchNorm1d(3), hvd.SyncBatchNorm(3)
        expected = plain(whole.float())
        for layer in (synced, copy.deepcopy(synced).to(dtype)):
            actual = layer(mine)
            assert actual.dtype == dtype
            close(actual.float(), part_of(expected, (4,) * size), 0.01)
            (actual * actual).sum().backward()
            assert mine.grad.dtype == dtype and layer.weight.grad.dtype == layer.weight.dtype
            mine.grad = None
        assert synced.running_var.dtype == torch.float32
        close(synced.running_mean, plain.running_mean, 1e-5)
        close(synced.running_var, plain.running_var, 1e-4)


@pytest.mark.np(2, 3, 4)  # with one rank it is torch's own layer
def test_16_bit_inputs_have_float32_statistics(cluster):
    cluster.run(narrow_floats)


def far_from_zero() -> None:
    size = hvd.size()
    joint = (
        torch.arange(8.0 * size).view(-1, 1) % 8
        + 2.0**20
        + 64 * (torch.arange(size * 8.0) // 8)[:, None]
    )
    layer = hvd.SyncBatchNorm(1, momentum=1.0)
    mine = part_of(joint, (8,) * size)
    close(layer(mine), (mine - joint.mean()) / joint.double().std(correction=0), 1e-2)
    close(layer.running_var, joint.double().var(0).float(), 1e-6)


def test_a_mean_far_from_zero_does_not_swamp_the_variance(cluster):
    cluster.run(far_from_zero)


def layouts() -> None:
    size = hvd.size()
    counts = (2,) * size
    joint = random(2 * size, 4, 3, 5)
    plain, synced = pair_of_layers(4)
    expected = part_of(plain(joint), counts)
    mine = part_of(joint, counts)
    strided = torch.stack([mine, mine], dim=-1)[..., 0]
    for given in (
        mine.contiguous(memory_format=torch.channels_last),
        mine.transpose(2, 3).contiguous().transpose(2, 3),
        strided,
        torch.cat([mine, mine])[:2],
    ):
        given = given.requires_grad_()
        result = synced(given)
        close(result, expected)
        if given.is_contiguous(memory_format=torch.channels_last):
            assert result.is_contiguous(memory_format=torch.channels_last)
        result.sum().backward()
        close(given.grad, torch.zeros_like(mine), 1e-11)
    expanded = torch.ones(2, 4, 1, 1, dtype=torch.float64).expand(2, 4, 3, 5)
    close(synced(expanded), synced.bias.view(1, 4, 1, 1).expand(2, 4, 3, 5))


def test_layouts(cluster):
    cluster.run(layouts)


def nothing_anywhere() -> None:
    layer = hvd.SyncBatchNorm(3)
    x = torch.empty(0, 3, 2, 2, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3, 2, 2)
    same(layer.weight.grad, torch.zeros(3))
    same(layer.running_mean, torch.zeros(3))
    same(layer.running_var, torch.ones(3))
    assert layer.num_batches_tracked.item() == 1


def test_a_batch_that_is_empty_on_all_ranks_changes_nothing(cluster):
    cluster.run(nothing_anywhere)


def one_value() -> None:
    layer = hvd.SyncBatchNorm(3)
    alone = torch.ones(1 if hvd.rank() == 0 else 0, 3)
    with pytest.raises(ValueError, match=r"value.* per channel"):
        layer(alone)
    same(layer.running_mean, torch.zeros(3))
    y = layer(torch.full((2, 3), float(hvd.rank())))  # usable afterwards
    assert y.isfinite().all()


def test_a_single_value_per_channel_is_an_error_on_all_ranks(cluster):
    cluster.run(one_value)


def wrong_inputs() -> None:
    layer = hvd.SyncBatchNorm(3)
    with pytest.raises(ValueError, match="at least two dims"):
        layer(torch.ones(3))
    with pytest.raises(ValueError, match=r"SyncBatchNorm\(3\).*4 channels"):
        layer(torch.ones(2, 4))
    with pytest.raises(TypeError, match="floating point"):
        layer(torch.ones(2, 3, dtype=torch.int64))
    layer.process_set = hvd.ProcessSet([0])
    with pytest.raises(TypeError, match="not registered"):
        layer(torch.ones(2, 3))
    layer.process_set = "everyone"
    with pytest.raises(TypeError, match="process_set"):
        layer(torch.ones(2, 3))


def test_wrong_inputs_fail_at_the_call(cluster):
    cluster.run(wrong_inputs)


def evaluation_on_one_rank() -> None:
    layer = hvd.SyncBatchNorm(3).eval()
    layer.running_mean.fill_(2.0)
    if hvd.rank() == 0:
        close(layer(torch.full((1, 3), 5.0)), torch.full((1, 3), 3.0), 1e-4)


def test_evaluation_with_running_statistics_needs_no_other_rank(cluster):
    cluster.run(evaluation_on_one_rank)


def test_evaluation_needs_no_job():
    layer = hvd.SyncBatchNorm(3).eval()
    close(layer(torch.ones(1, 3)), torch.ones(1, 3), 1e-4)
    with pytest.raises(hvd.HorovodInternalError, match="not initialized"):
        layer.train()(torch.ones(2, 3))


def without_gradients() -> None:
    joint, counts = random(3 * hvd.size(), 4), (3,) * hvd.size()
    plain, synced = pair_of_layers(2)
    with torch.no_grad():
        y = synced(part_of(joint, counts))
    assert not y.requires_grad
    close(y, part_of(plain(joint), counts))
    close(synced.running_var, plain.running_var)
    # An input that needs no gradient, as in the first layer: those of weight and bias remain.
    synced(part_of(joint, counts)).sum().backward()
    close(synced.bias.grad, torch.full((4,), 3.0, dtype=torch.float64))


def test_training_mode_without_gradients(cluster):
    cluster.run(without_gradients)


class Twice(nn.Module):
    """A layer that is used twice, beside another one; perhaps with activation checkpointing."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.shared, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.keep = keep

    def block(self, x: Tensor) -> Tensor:
        return self.shared(self.other(self.shared(x).sin()) * x)

    def forward(self, x: Tensor) -> Tensor:
        if self.keep == "all":
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.keep == "reentrant")


def used_twice(keep: str) -> None:
    counts = (3, 2, 4, 0)[: hvd.size()]
    plain = Twice(keep).double()
    synced = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    for seed in range(2):
        step(plain, synced, random(sum(counts), 4, seed=seed), counts)


@pytest.mark.parametrize("keep", ["all", "reentrant", "not reentrant"])
def test_one_layer_twice_in_a_pass_also_checkpointed(cluster, keep):
    cluster.run(used_twice, keep)


def passes_in_flight() -> None:
    size = hvd.size()
    counts = (2,) * size
    plain, synced = pair_of_layers(2)
    losses = []
    for layer, choose in ((plain, lambda t: t), (synced, lambda t: part_of(t, counts))):
        outputs = [layer(choose(random(2 * size, 4, seed=s))) for s in range(3)]
        factors = [choose(random(2 * size, 4, seed=10 + s)) for s in range(3)]
        losses.append([(y * f).sum() for y, f in zip(outputs, factors, strict=True)])
    for expected, actual in zip(*reversed(losses), strict=True):
        expected.backward()
        actual.backward()
    close(hvd.allreduce(synced.weight.grad, op=hvd.Sum), plain.weight.grad, 1e-11)


def test_several_forward_passes_before_the_backward_passes(cluster):
    cluster.run(passes_in_flight)


def derivatives() -> None:
    layer = hvd.SyncBatchNorm(4).double()
    x = random(3, 4, seed=hvd.rank()).requires_grad_()
    (once,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    (plainly,) = torch.autograd.grad(layer(x).pow(3).sum(), x)
    same(once.detach(), plainly)
    if hvd.size() > 1:  # with one rank it is torch's own layer
        with pytest.raises(NotImplementedError, match="no second derivative"):
            once.pow(2).sum().backward()
        (once,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            once.pow(2).sum().backward()


def test_first_derivative_with_create_graph_but_no_second(cluster):
    cluster.run(derivatives)


def trained_together() -> None:
    size = hvd.size()

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
        ).double()

    alone, together = model(), hvd.SyncBatchNorm.convert_sync_batchnorm(model())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, together)]
    optimizers[1] = hvd.DistributedOptimizer(optimizers[1], together.named_parameters())
    counts = (4,) * size
    for seed in range(4):
        joint = random(4 * size, 2, 5, 5, seed=seed)
        for net, optimizer, batch in (
            (alone, optimizers[0], joint),
            (together, optimizers[1], part_of(joint, counts)),
        ):
            optimizer.zero_grad()
            net(batch).pow(2).mean().backward()
            optimizer.step()
    for (name, ours), theirs in zip(
        together.state_dict().items(), alone.state_dict().values(), strict=True
    ):
        close(ours, theirs, 1e-10)
        same(hvd.broadcast(ours, 0, name=name), ours)


def test_training_equals_one_process_with_the_joint_batch(cluster):
    cluster.run(trained_together)


# --- process sets, join ------------------------------------------------------------------------


def in_two_sets() -> None:
    """Each set has statistics of its own, and its own number of passes."""
    size, rank = hvd.size(), hvd.rank()
    members = [[r for r in range(size) if r % 2 == odd] for odd in (0, 1)]
    sets = [hvd.add_process_set(ranks) for ranks in members]
    try:
        mine, ranks = sets[rank % 2], members[rank % 2]
        plain, layer = pair_of_layers(2)
        layer = hvd.SyncBatchNorm.convert_sync_batchnorm(layer, mine)
        for seed in range(2 + rank % 2):
            joint = random(3 * len(ranks), 4, seed=10 * (rank % 2) + seed)
            whole, part = (
                t.clone().requires_grad_() for t in (joint, joint[ranks.index(rank) :: len(ranks)])
            )
            factors = random(*joint.shape, seed=99)
            (plain(whole) * factors).sum().backward()
            (layer(part) * factors[ranks.index(rank) :: len(ranks)]).sum().backward()
            close(part.grad, whole.grad[ranks.index(rank) :: len(ranks)])
        close(layer.running_mean, plain.running_mean)
        close(layer.running_var, plain.running_var)
        layer.process_set = sets[1 - rank % 2]
        with pytest.raises(ValueError, match="not a member"):
            layer(torch.ones(2, 4, dtype=torch.float64))
        copied = copy.deepcopy(layer)
        assert copied.process_set is layer.process_set
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)


@pytest.mark.np(3, 4)
def test_process_sets(cluster):
    cluster.run(in_two_sets)


def joined() -> None:
    """Rank r has r + 1 batches; those that still have some are normalized together."""
    size, rank = hvd.size(), hvd.rank()
    plain, synced = pair_of_layers(2)
    for number in range(rank + 1):
        present = size - number
        joint = random(2 * present, 4, seed=number)
        whole = joint.clone().requires_grad_()
        place = slice(2 * (rank - number), 2 * (rank - number) + 2)
        part = joint[place].clone().requires_grad_()
        factors = random(*joint.shape, seed=99)
        (plain(whole) * factors).sum().backward()
        (synced(part) * factors[place]).sum().backward()
        close(part.grad, whole.grad[place])
        close(synced.running_var, plain.running_var)
    assert hvd.join() == size - 1
    plain, synced = pair_of_layers(2)
    counts = (2,) * size
    step(plain, synced, random(2 * size, 4), counts)


def test_ranks_that_have_joined_are_left_out(cluster):
    cluster.run(joined)


# --- the converter, copies ---------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.BatchNorm1d(2)
        self.first, self.again = shared, shared
        self.inner = nn.ModuleDict(
            {"a": nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.InstanceNorm2d(3), shared)}
        )
        self.theirs = nn.SyncBatchNorm(2, eps=0.1)
        self.absent = None
        self.bare = nn.BatchNorm3d(2, affine=False, track_running_stats=False)


def test_the_converter_keeps_everything_but_the_class():
    model = Nested()
    model.inner.double().eval()
    before = dict(model.state_dict(keep_vars=True))
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model) is model
    after = dict(model.state_dict(keep_vars=True))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, hvd.SyncBatchNorm)}
    assert list(layers) == ["first", "inner.a.0", "theirs", "bare"]
    assert model.again is model.first is model.inner["a"][2]
    assert type(model.inner["a"][1]) is nn.InstanceNorm2d
    assert [m.training for m in layers.values()] == [False, False, True, True]
    assert layers["inner.a.0"].momentum is None and layers["theirs"].eps == 0.1
    assert layers["bare"].weight is None and not layers["bare"].track_running_stats
    assert not layers["bare"].affine and layers["first"].affine
    assert all(m.process_set is hvd.global_process_set for m in layers.values())


def test_the_converter_with_a_layer_itself_and_another_process_set():
    some = hvd.ProcessSet([0, 1])
    plain = nn.BatchNorm1d(3)
    layer = hvd.SyncBatchNorm.convert_sync_batchnorm(plain, some)
    assert type(layer) is hvd.SyncBatchNorm and type(plain) is nn.BatchNorm1d
    assert layer.process_set is some and layer.weight is plain.weight
    everyone = hvd.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert everyone.process_set is hvd.global_process_set

    without_bias = nn.BatchNorm1d(3)
    without_bias.bias = None
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(without_bias).bias is None


def test_the_converter_refuses_lazy_layers():
    with pytest.raises(ValueError, match="one forward pass"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copied", "pickled"]
)
def test_copies(duplicate: Callable[[nn.Module], nn.Module]):
    model = nn.Sequential(hvd.SyncBatchNorm(3, momentum=0.25))
    nn.init.uniform_(model[0].weight)
    again = duplicate(model)
    assert again[0].process_set is hvd.global_process_set and again[0].momentum == 0.25
    assert again[0].weight is not model[0].weight
    same(again[0].weight, model[0].weight)
    some = hvd.ProcessSet([0, 1])
    layer = hvd.SyncBatchNorm(3, process_set=some)
    assert copy.deepcopy(layer).process_set is some
    loaded = pickle.loads(pickle.dumps(layer)).process_set
    assert loaded.ranks == [0, 1] and loaded.process_set_id is None


def test_state_dicts_are_those_of_batch_norm():
    plain, synced = nn.BatchNorm2d(3), hvd.SyncBatchNorm(3)
    plain.running_mean.uniform_()
    synced.load_state_dict(plain.state_dict())
    same(synced.running_mean, plain.running_mean)
    plain.load_state_dict(synced.state_dict())
    assert isinstance(synced, nn.modules.batchnorm._BatchNorm)
