"""DistributedOptimizer: joint buckets, in which gradients are reduced without being asked for."""

import copy
import gc
import os
import weakref
from collections.abc import Callable

import pytest
import torch
from support.cluster import Cluster
from support.gradients import joint_buckets, parameter, push, wrap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hvdtorch as hvd


def layout() -> list[list[str]]:
    """Names of the parameters in each bucket."""
    return [[slot.name.rpartition(".")[2] for slot in each.slots] for each in joint_buckets()]


def launches() -> list[int]:
    return [bucket.native.launches for bucket in joint_buckets()]


def filled(parameters: list[nn.Parameter], factor: float) -> Tensor:
    """A loss whose gradient of parameter number i is (i + 1) * factor, everywhere."""
    parts = [(p * ((i + 1) * factor)).sum() for i, p in enumerate(parameters)]
    return torch.stack([part.float() for part in parts]).sum()


# --- How buckets are made ----------------------------------------------------------------------


def arranged_by(order_of_rank: str) -> tuple[list[list[str]], list[int], list[float]]:
    """Four gradients; rank r's become ready in the order that its word says."""
    named = {f"arranged.{name}": parameter(0.0) for name in "abcd"}
    optimizer = wrap(named)
    by_letter = {name[-1]: p for name, p in named.items()}
    for _ in range(3):
        optimizer.zero_grad()
        total = torch.zeros((), requires_grad=True)
        for name in reversed(order_of_rank.split()[hvd.rank()]):  # the last one fires first
            total = total * 1.0 + by_letter[name].sum() * (1.0 + hvd.rank())
        total.backward()
        optimizer.step()
    return layout(), launches(), [p.grad.item() for p in named.values()]


@pytest.mark.np(2)
def test_the_order_of_readiness_is_agreed(cluster: Cluster) -> None:
    one, other = cluster.run(arranged_by, "bdac bdac")
    assert one == other == ([["b", "d", "a", "c"]], [2], [1.5] * 4)
    one, other = cluster.run(arranged_by, "abcd dcba")
    assert one == other
    assert sorted(one[0][0]) == list("abcd") and one[1:] == ([2], [1.5] * 4)


def sizes_and_dtypes() -> list[list[str]]:
    big = (1 << 20) // 4
    named = {
        "sizes.big": nn.Parameter(torch.zeros(big)),
        "sizes.half": parameter(0.0, dtype=torch.float16),
        "sizes.s1": parameter(0.0),
        "sizes.s2": parameter(0.0),
        "sizes.half2": parameter(0.0, dtype=torch.float16),
        "sizes.wide": nn.Parameter(torch.zeros(big // 8)),
        "sizes.s3": parameter(0.0),
    }
    optimizer = wrap(named)
    for _ in range(2):
        optimizer.zero_grad()
        filled(list(named.values()), 1.0 + hvd.rank()).backward()
    for index, p in enumerate(named.values()):
        assert torch.equal(p.grad, torch.full_like(p, 1.5 * (index + 1)))
    return layout()


@pytest.mark.np(2)
def test_dtypes_stay_apart_and_a_large_gradient_is_alone(cluster: Cluster) -> None:
    one, other = cluster.run(sizes_and_dtypes)
    assert one == other
    buckets = {frozenset(each) for each in one}
    assert frozenset(["big"]) in buckets and frozenset(["half", "half2"]) in buckets
    # The first bucket is a small one: an eighth fills it.
    rest = [each for each in one if not {"big", "half"} & set(each)]
    assert sorted(name for each in rest for name in each) == ["s1", "s2", "s3", "wide"] and len(
        rest
    ) in (1, 2)


def taking_turns() -> tuple[list[list[str]], list[list[float | None]], list[int]]:
    """A trunk and two heads of which every pass reaches one; then a gradient nobody has seen."""
    names = ["t1", "t2", "a1", "a2", "b1", "b2", "late"]
    named = {f"turns.{name}": parameter(0.0) for name in names}
    optimizer = wrap(named)
    p = {name.rpartition(".")[2]: each for name, each in named.items()}
    seen = []
    for turn in range(6):
        optimizer.zero_grad()
        head = "a" if turn % 2 == 0 else "b"
        reached = [p["t1"], p["t2"], p[f"{head}1"], p[f"{head}2"]]
        push(1.0 + hvd.rank(), *reached, *([p["late"]] if turn == 5 else []))
        optimizer.step()
        seen.append([None if each.grad is None else each.grad.item() for each in named.values()])
    before = launches()
    optimizer.zero_grad()
    push(1.0, p["t1"], p["t2"], p["a1"], p["a2"])
    again = [late - early for early, late in zip(before, launches(), strict=True)]
    return sorted(map(sorted, layout())), seen, sorted(again)


@pytest.mark.np(2, 3)
def test_gradients_that_take_turns_are_parted(cluster: Cluster) -> None:
    mean = (1 + cluster.size) / 2
    a, b = [mean] * 4 + [None] * 3, [mean] * 2 + [None] * 2 + [mean] * 2 + [None]
    for buckets, seen, again in cluster.run(taking_turns):
        assert seen == [a, b, a, b, a, [*b[:-1], mean]]
        assert buckets == [["a1", "a2"], ["b1", "b2"], ["late"], ["t1", "t2"]]
        assert again == [0, 0, 1, 1]


def some_on_each_rank() -> list[float | None]:
    """Four gradients in a bucket; then no rank has all of them, then one rank has none."""
    named = {f"some.{i}": parameter(0.0) for i in range(4)}
    p = list(named.values())
    optimizer = wrap(named)
    push(1.0, *p)
    seen: list[float | None] = []
    for reached in ([p[:3], p[1:]], [p, []], [p[:1], p[:1]]):
        optimizer.zero_grad()
        push(2.0, *reached[hvd.rank()]) if reached[hvd.rank()] else None
        optimizer.step()
        seen += [None if each.grad is None else each.grad.item() for each in p]
    return seen


@pytest.mark.np(2)
def test_ranks_may_reach_different_members(cluster: Cluster) -> None:
    expected = [1.0, 2.0, 2.0, 1.0, *[1.0] * 4, 2.0, None, None, None]
    assert cluster.run(some_on_each_rank) == [expected] * 2


def converted() -> list[object]:
    """The model becomes double after some steps: the parameters get new nodes."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = wrap({f"converted.{name}": p for name, p in model.named_parameters()})
    seen: list[object] = []
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(1, 2, dtype=dtype)) * (1.0 + hvd.rank())).sum().backward()
            bias = model[1].bias.grad
            seen += [str(bias.dtype), bias.item()]
    return seen


@pytest.mark.np(2)
def test_a_model_may_be_converted(cluster: Cluster) -> None:
    expected = ["torch.float32", 1.5] * 3 + ["torch.float64", 1.5] * 3
    assert cluster.run(converted) == [expected] * 2


# --- Gradients in the memory of a bucket -------------------------------------------------------


class Bucketed:
    """Parameters in one bucket, after two steps."""

    def __init__(self, name: str, *shapes: tuple[int, ...], **options: object) -> None:
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        named = {f"{name}.{i}": p for i, p in enumerate(self.parameters)}
        self.optimizer = wrap(named, **options)
        for _ in range(2):
            self.pass_(1.0)
        assert len(joint_buckets()) == 1

    def pass_(self, factor: float, zero: bool = True, set_to_none: bool = True) -> None:
        """One backward(); its gradients are (i + 1) * factor * (rank + 1) here."""
        if zero:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        filled(self.parameters, factor * (1.0 + hvd.rank())).backward()

    def gradients(self) -> list[float]:
        """The one value of each gradient, over its index; divided by the mean of ranks + 1."""
        mean = (1 + hvd.size()) / 2
        values = []
        for i, p in enumerate(self.parameters):
            assert torch.equal(p.grad, torch.full_like(p, p.grad.flatten()[0].item()))
            values.append(p.grad.flatten()[0].item() / (i + 1) / mean)
        return values


def shared_memory_of_gradients() -> tuple[bool, bool, list[float]]:
    model = Bucketed("views", (3,), (2, 2), ())
    pointers = [p.grad.data_ptr() for p in model.parameters]
    within = max(pointers) - min(pointers) < 4096
    model.pass_(5.0)
    return within, pointers == [p.grad.data_ptr() for p in model.parameters], model.gradients()


@pytest.mark.np(2, 3)
def test_gradients_stay_in_the_memory_of_their_bucket(cluster: Cluster) -> None:
    assert cluster.run(shared_memory_of_gradients) == [(True, True, [5.0] * 3)] * cluster.size


def references_kept(kind: str) -> tuple[list[float], list[float]]:
    """What a gradient that the user keeps says after another step; and that step's gradients."""
    model = Bucketed(f"kept.{kind}", (3,), (2, 2), (4,))
    keep: dict[str, Callable[[Tensor], object]] = {
        "itself": lambda g: g,
        "view": lambda g: g.view(-1)[1:],
        "detached": lambda g: g.detach(),
        "numpy": lambda g: g.numpy(),
    }
    model.pass_(2.0)
    kept = keep[kind](model.parameters[1].grad)
    before = torch.as_tensor(kept).flatten().tolist()
    for factor in (7.0, 8.0):
        model.pass_(factor)
    assert torch.as_tensor(kept).flatten().tolist() == before
    return sorted(set(before)), model.gradients()


@pytest.mark.np(2)
@pytest.mark.parametrize("kind", ["itself", "view", "detached", "numpy"])
def test_a_gradient_that_the_user_keeps_stays_what_it_was(cluster: Cluster, kind: str) -> None:
    assert cluster.run(references_kept, kind) == [([6.0], [8.0] * 3)] * 2


def kept_during_a_pass() -> tuple[list[float], list[float]]:
    """A hook keeps the last step's gradient after the first of this step's is in the bucket."""
    model = Bucketed("during", (3,), (2, 2), (4,))
    model.pass_(2.0)
    old = [p.grad for p in model.parameters]
    views = [weakref.ref(g) for g in old]
    kept: list[Tensor] = []
    for p in model.parameters:
        p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    del old
    model.pass_(7.0)
    first = list(kept)
    assert all(ref() is None for ref in views)
    values = [g.flatten()[0].item() for g in first]
    model.pass_(9.0)
    assert [g.flatten()[0].item() for g in first] == values
    return sorted(values), model.gradients()


@pytest.mark.np(2)
def test_a_hook_may_keep_gradients(cluster: Cluster) -> None:
    assert cluster.run(kept_during_a_pass) == [([10.5, 21.0, 31.5], [9.0] * 3)] * 2


def accumulated(set_to_none: bool | None) -> tuple[list[float], bool]:
    model = Bucketed(f"accumulated.{set_to_none}", (3,), (2, 2))
    model.pass_(2.0)
    given = model.parameters[0].grad
    if set_to_none is None:
        model.pass_(3.0, zero=False)
    else:
        model.pass_(3.0, set_to_none=set_to_none)
    return model.gradients(), model.parameters[0].grad is given


@pytest.mark.np(2)
def test_accumulation_is_in_place_as_in_torch(cluster: Cluster) -> None:
    assert cluster.run(accumulated, None) == [([5.0] * 2, True)] * 2
    assert cluster.run(accumulated, False) == [([3.0] * 2, True)] * 2
    assert cluster.run(accumulated, True) == [([3.0] * 2, False)] * 2


@pytest.mark.np(2)
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Max])
def test_other_ops_reduce_every_contribution_once(cluster: Cluster, op: int) -> None:
    factor = 3.0 if op == hvd.Sum else 2.0
    assert cluster.run(other_op, op) == [[factor * 5.0, factor * 10.0, factor * 4.0]] * 2


def other_op(op: int) -> list[float]:
    model = Bucketed(f"op{op}", (3,), (2, 2), op=op)
    model.pass_(2.0)
    model.pass_(3.0, zero=False)
    seen = [p.grad.flatten()[0].item() for p in model.parameters]
    model.pass_(4.0)
    return [*seen, model.parameters[0].grad[0].item()]


def replaced_by_hand() -> tuple[list[float], list[bool]]:
    """The gradients are put into one flat tensor of the user's, which has to stay theirs."""
    model = Bucketed("replaced", (3,), (2, 2))
    flat = torch.zeros(7)
    model.parameters[0].grad = flat[:3]
    model.parameters[1].grad = flat[3:].view(2, 2)
    model.pass_(4.0, zero=False)
    return flat.tolist(), [
        p.grad.untyped_storage().data_ptr() == flat.data_ptr() for p in model.parameters
    ]


@pytest.mark.np(2)
def test_gradients_of_the_users_own_memory_stay_there(cluster: Cluster) -> None:
    assert cluster.run(replaced_by_hand) == [([6.0] * 3 + [12.0] * 4, [True, True])] * 2


def channels_last(everywhere: bool) -> tuple[list[float], list[tuple[int, ...]]]:
    weights = [nn.Parameter(torch.zeros(2, 3, 2, 2)) for _ in range(3)]
    if everywhere or hvd.rank() == 0:
        for w in weights:
            w.data = w.data.contiguous(memory_format=torch.channels_last)
    optimizer = wrap({f"last.{everywhere}.{i}": w for i, w in enumerate(weights)})
    values = torch.arange(24.0).view(2, 3, 2, 2)
    for _ in range(3):
        optimizer.zero_grad()
        sum(((w * values).sum() * (1.0 + hvd.rank()) for w in weights), torch.zeros(())).backward()
        assert all(torch.equal(w.grad, values * 1.5) for w in weights)
    assert len(joint_buckets()) == 1
    return weights[0].grad.flatten().tolist(), [w.grad.stride() for w in weights]


@pytest.mark.np(2)
@pytest.mark.parametrize("everywhere", [True, False])
def test_permuted_layouts(cluster: Cluster, everywhere: bool) -> None:
    one, other = cluster.run(channels_last, everywhere)
    assert one[0] == other[0] and one[1] == [(12, 1, 6, 3)] * 3
    assert other[1] == ([(12, 1, 6, 3)] * 3 if everywhere else [(12, 4, 2, 1)] * 3)


def with_a_graph() -> tuple[list[float], float]:
    model = Bucketed("graph", (1,), (1,))
    with torch.no_grad():
        for p in model.parameters:
            p.fill_(2.0)
    model.optimizer.zero_grad()
    loss = sum((p**3).sum() for p in model.parameters) * (hvd.rank() + 1)
    loss.backward(create_graph=True)  # (r + 1) * 3 w^2
    seen = [p.grad.item() for p in model.parameters]
    (curvature,) = torch.autograd.grad(model.parameters[0].grad.sum(), model.parameters[0])
    for p in model.parameters:
        p.grad = None  # break the cycle that create_graph makes
    return seen, curvature.item()


@pytest.mark.np(2)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_have_a_graph(cluster: Cluster) -> None:
    assert cluster.run(with_a_graph) == [([18.0] * 2, 12.0), ([18.0] * 2, 24.0)]


def fires_again(reentrant: bool) -> list[float]:
    """The bucket is complete, or not, when one of its members fires once more."""
    w, v = parameter(1.0), parameter(1.0)
    optimizer = wrap({f"again.{reentrant}.w": w, f"again.{reentrant}.v": v})
    push(1.0, w, v)
    seen = []
    for times in (2, 3):
        optimizer.zero_grad()
        y = torch.ones(1, requires_grad=True)
        for _ in range(times if hvd.rank() == 0 else 2):
            y = checkpoint(lambda x: x * w, y, use_reentrant=reentrant)
        (y + v).sum().backward()
        seen += [w.grad.item(), v.grad.item()]
    return seen


@pytest.mark.np(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_member_may_fire_again(cluster: Cluster, reentrant: bool) -> None:
    assert cluster.run(fires_again, reentrant) == [[2.0, 1.0, 2.5, 1.0]] * 2


def in_several_passes() -> tuple[list[float], list[float], list[int]]:
    model = Bucketed("passes", (3,), (2, 2))
    model.optimizer.set_backward_passes_per_step(3)
    seen = []
    for _ in range(3):
        model.pass_(1.0)
        model.pass_(2.0, zero=False)
        before = model.parameters[0].grad[0].item()
        model.pass_(3.0, zero=False)
        seen += model.gradients()
    return [before], seen, launches()


@pytest.mark.np(2)
def test_accumulation_over_passes(cluster: Cluster) -> None:
    for rank, (before, seen, counts) in enumerate(cluster.run(in_several_passes)):
        assert (before, seen, counts) == ([3.0 * (rank + 1)], [6.0] * 6, [2])


def sparse_later() -> list[list[float]]:
    """A member of a bucket has a sparse gradient in one pass: it is alone from then on."""
    table, w = nn.Parameter(torch.zeros(2, 1)), parameter(0.0)
    optimizer = wrap({"later.table": table, "later.w": w})
    seen = []
    for sparse in (False, False, True, True, False):
        optimizer.zero_grad()
        rows = nn.functional.embedding(torch.tensor([hvd.rank()]), table, sparse=sparse)
        (rows.sum() * 2.0 + w.sum() * (1.0 + hvd.rank())).backward()
        seen.append([*table.grad.to_dense().flatten().tolist(), w.grad.item()])
    return [*seen, [float(len(each)) for each in layout()]]


@pytest.mark.np(2)
def test_a_gradient_may_become_sparse(cluster: Cluster) -> None:
    assert cluster.run(sparse_later) == [[[1.0, 1.0, 1.5]] * 5 + [[1.0]]] * 2


# --- Failures ----------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise RuntimeError("half way")


def raised(where: str) -> tuple[list[str], list[float]]:
    """A pass that raises, on all ranks or on rank 0, when two of three are ready; then more."""
    model = Bucketed(f"raised.{where}", (1,), (1,), (1,))
    a, b, c = model.parameters
    errors: list[str] = []
    model.optimizer.zero_grad()
    if where == "everywhere" or hvd.rank() == 0:
        with pytest.raises(RuntimeError, match="half way"):
            loss = Fails.apply(a) * 1.0
            (loss * 1.0 + b * 5.0 + c * 5.0).sum().backward()
    for _ in range(3):
        try:
            model.pass_(2.0)
        except hvd.HorovodInternalError as error:
            errors.append(str(error))
            model.optimizer.zero_grad()
    return errors, model.gradients()


@pytest.mark.np(2)
def test_a_pass_that_raised_everywhere_is_forgotten(cluster: Cluster) -> None:
    assert cluster.run(raised, "everywhere") == [([], [2.0] * 3)] * 2


@pytest.mark.np(2)
def test_a_pass_that_raised_on_one_rank_is_told(cluster: Cluster) -> None:
    one, other = cluster.run(raised, "rank 0")
    assert one == other and one[1] == [2.0] * 3
    assert len(one[0]) == 1 and "an earlier backward() raised on rank 0" in one[0][0]


# --- Lifetimes ---------------------------------------------------------------------------------


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def large(kind: str) -> tuple[list[float], list[float]]:
    """What a large gradient that is kept says after more steps, and the last step's gradients."""
    parameters = [nn.Parameter(torch.zeros(600, 500)) for _ in range(3)]
    optimizer = wrap({f"large.{kind}.{i}": p for i, p in enumerate(parameters)})
    kept: list[Tensor] = []
    for step in range(6):
        if kind == "accumulated":
            optimizer.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()
        sum(((p @ torch.full((500, 2), 0.5)).sum() for p in parameters), torch.zeros(())).mul(
            (step + 1.0) * (1 + hvd.rank())
        ).backward()
        if kind == "kept":
            kept.append(parameters[1].grad)
        elif kind == "copied":
            kept.append(parameters[1].grad.clone())
    assert len(joint_buckets()) == 3
    for each in [*kept, *(p.grad for p in parameters)]:
        assert torch.equal(each, torch.full_like(each, each[0, 0].item()))
    return [each[0, 0].item() for each in kept], [p.grad[0, 0].item() for p in parameters]


@pytest.mark.np(2)
@pytest.mark.parametrize("kind", ["kept", "copied", "accumulated"])
def test_large_gradients(cluster: Cluster, kind: str) -> None:
    kept = [] if kind == "accumulated" else [1.5 * (step + 1) for step in range(6)]
    assert cluster.run(large, kind) == [(kept, [9.0] * 3)] * 2


def inside_the_job(where: str) -> list[float]:
    """Large gradients with shutdown() and init() between, or with a forked child between."""
    w, v = nn.Parameter(torch.zeros(600, 500)), nn.Parameter(torch.zeros(600, 500))
    optimizer = wrap({f"job.{where}.w": w, f"job.{where}.v": v})
    seen = []
    for step in range(6):
        if step == 3 and where == "restart":
            hvd.shutdown()
            hvd.init()
        optimizer.zero_grad()
        ((w.sum() + v.sum()) * (1.0 + hvd.rank())).backward()
        if step == 3 and where == "fork":
            before = w.grad.clone()
            child = os.fork()
            if child == 0:
                (torch.zeros(600, 500) + 7.0).sum().item()
                os._exit(0)
            os.waitpid(child, 0)
            assert torch.equal(before, w.grad)
        seen.append(v.grad[5, 5].item())
    return seen


@pytest.mark.np(2)
@pytest.mark.parametrize("where", ["restart", "fork"])
def test_large_gradients_outlive_jobs_and_children(cluster: Cluster, where: str) -> None:
    assert cluster.run(inside_the_job, where) == [[1.5] * 6] * 2


def two_hundred_steps(keep: bool) -> int:
    """Growth of resident memory; with `keep`, every step's memory is asked for anew."""
    model = Bucketed(f"steps.{keep}", *[(60, 60)] * 8)
    for step in range(220):
        if step == 20:
            before = resident()
        kept = model.parameters[0].grad if keep else None
        model.pass_(1.0 + step % 3)
        del kept
    return resident() - before


@pytest.mark.np(2)
@pytest.mark.parametrize("keep", [False, True])
def test_memory_does_not_grow(cluster: Cluster, keep: bool) -> None:
    # One step's gradients are 115 kB.
    assert all(growth < 16 << 20 for growth in cluster.run(two_hundred_steps, keep))


def let_go() -> list[bool]:
    model = Bucketed("gone", (3,), (2, 2))
    gradient = model.parameters[0].grad
    refs = [weakref.ref(p) for p in model.parameters] + [weakref.ref(model.optimizer)]
    gc.disable()
    del model
    gone = [ref() is None for ref in refs]
    gc.enable()
    assert gradient.tolist() == [1.5] * 3  # lives on, and its memory
    return gone


@pytest.mark.np(2)
def test_parameters_go_with_their_optimizer(cluster: Cluster) -> None:
    assert cluster.run(let_go) == [[True] * 3] * 2


def convolve():
    """Layers whose libraries ask for scratch memory, at times of just the size of a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 256, 3),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 3),
    ).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    images = torch.randn(2, 3, 9, 9)  # the same on all ranks
    for _ in range(4):
        model(images).square().mean().backward()
        plain(images).square().mean().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        optimizer.zero_grad()
        plain.zero_grad()
    return True


def test_convolutions_with_large_gradients(cluster):
    assert all(cluster.run(convolve))
