"""DistributedOptimizer: what the wrapped object is and accepts; that it is the user's."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections import OrderedDict

import pytest
import torch
from support.cluster import Cluster
from support.gradients import Submissions, parameter, push, wrap
from torch import Tensor, nn

import hvdtorch as hvd

# --- Identity and state ------------------------------------------------------------------------


def keeps_everything() -> None:
    w = parameter(1.0)
    sgd = torch.optim.SGD([w], lr=0.5, momentum=0.9)
    fired = []
    sgd.register_step_pre_hook(lambda *_: fired.append("pre"))
    sgd.register_step_post_hook(lambda *_: fired.append("post"))
    w.grad = torch.ones(1)
    sgd.step()
    group, buffer = sgd.param_groups[0], sgd.state[w]["momentum_buffer"]
    wrapped = hvd.DistributedOptimizer(sgd, named_parameters=[("w", w)])
    assert wrapped is sgd
    assert isinstance(wrapped, torch.optim.SGD) and type(wrapped) is not torch.optim.SGD
    assert type(wrapped).__name__ == "SGD" and "hvdtorch" in type(wrapped).__module__
    assert wrapped.param_groups[0] is group and wrapped.state[w]["momentum_buffer"] is buffer
    extra = parameter(2.0)
    wrapped.add_param_group({"params": [extra]})
    assert (wrapped.param_groups[1]["lr"], wrapped.param_groups[1]["momentum"]) == (0.5, 0.9)
    fired.clear()
    wrapped.zero_grad()
    push(1.0, w)
    wrapped.step()
    assert fired == ["pre", "post"]
    assert buffer.item() == pytest.approx(1.9) and w.item() == pytest.approx(0.5 - 0.5 * 1.9)


def test_wrapping_keeps_the_optimizer(cluster: Cluster) -> None:
    cluster.run(keeps_everything)


def keeps_amp_attribute() -> bool:
    adam = torch.optim.Adam([parameter(1.0)], fused=True)
    before = adam._step_supports_amp_scaling
    return before and hvd.DistributedOptimizer(adam)._step_supports_amp_scaling


@pytest.mark.np(2)
def test_a_fused_optimizer_keeps_its_amp_scaling(cluster: Cluster) -> None:
    assert cluster.run(keeps_amp_attribute) == [True, True]


class NeedsArguments(torch.optim.SGD):
    """Cannot be constructed from its param groups; its step calls another class's step."""

    def __init__(self, params: list[Tensor], secret: str, *, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.secret = secret

    def step(self, closure=None):
        return super().step(closure)


class NoTorchInit(torch.optim.Optimizer):
    """As some third-party wrappers are: never calls torch's __init__, so it has no step hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.state, self.defaults = inner.state, inner.defaults

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def unusual(kind: str, scheduled: bool) -> tuple[list[float], int]:
    w = parameter(0.0)
    optimizer = torch.optim.SGD([w], lr=0.1)  # the first SGD gives SGD.step its hooks
    if kind == "arguments":
        optimizer = NeedsArguments([w], "x", lr=0.1)
    elif kind == "no init":
        optimizer = NoTorchInit(optimizer)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)] if scheduled else []
    optimizer = hvd.DistributedOptimizer(optimizer, [("w", w)], backward_passes_per_step=2)
    if scheduled:
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0))
    values = []
    with Submissions() as submissions:
        for _ in range(2):
            push(1.0 + hvd.rank(), w)  # a first pass only: step() has to reduce it
            optimizer.step()
            optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            values.append(round(w.item(), 6))
    return values, len(submissions)


@pytest.mark.np(2)
@pytest.mark.parametrize("kind", ["SGD", "arguments", "no init"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_step_reduces_whatever_the_optimizer_and_whatever_patches_its_step(
    cluster: Cluster, kind: str, scheduled: bool
) -> None:
    values = [-0.15, -0.225 if scheduled else -0.3]
    for got, submissions in cluster.run(unusual, kind, scheduled):
        assert got == values
        assert submissions == 5  # a gradient and an announcement, twice; the ranks agree first


def scheduler_warnings() -> list[str]:
    import warnings

    w = parameter(0.0)
    sgd = torch.optim.SGD([w], lr=0.1)
    before = torch.optim.lr_scheduler.LinearLR(sgd)
    optimizer = hvd.DistributedOptimizer(sgd, [("w", w)])
    after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        push(1.0, w)
        optimizer.step()
        before.step()
        after.step()
    return [str(warning.message) for warning in caught]


@pytest.mark.np(2)
def test_schedulers_see_the_steps(cluster: Cluster) -> None:
    assert cluster.run(scheduler_warnings) == [[], []]


# --- Round trips -------------------------------------------------------------------------------


def one_step(optimizer: torch.optim.Optimizer, w: nn.Parameter, gradient: float) -> float:
    optimizer.zero_grad()
    push(gradient, w)
    optimizer.step()
    return w.item()


def state_dict_round_trip() -> None:
    w, v = parameter(1.0), parameter(1.0)
    wrapped = hvd.DistributedOptimizer(torch.optim.Adam([w], lr=0.1), [("w", w)])
    one_step(wrapped, w, 1.0)
    plain = torch.optim.Adam([v], lr=0.5)
    plain.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    v.data.copy_(w.data)
    assert one_step(plain, v, 2.0) == one_step(wrapped, w, 2.0)
    wrapped.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert one_step(plain, v, 3.0) == one_step(wrapped, w, 3.0)
    # Equal to that of an optimizer that was never wrapped, so a checkpoint is one of plain torch.
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    buffer = io.BytesIO()
    torch.save(wrapped.state_dict(), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)


def test_state_dicts_load_either_way(cluster: Cluster) -> None:
    cluster.run(state_dict_round_trip)


def loaded_while_accumulating() -> list[float]:
    w = parameter(0.0)
    optimizer = wrap({"w": w}, backward_passes_per_step=2)
    saved = copy.deepcopy(optimizer.state_dict())
    push(1.0 + hvd.rank(), w)
    optimizer.load_state_dict(saved)
    w.grad = None
    seen = []
    for _ in range(2):
        push(10.0 + hvd.rank(), w)
        seen.append(w.grad.item())
    return seen


@pytest.mark.np(2)
def test_load_state_dict_starts_the_count_of_passes_anew(cluster: Cluster) -> None:
    assert cluster.run(loaded_while_accumulating) == [[10.0, 21.0], [11.0, 21.0]]


def deep_copy() -> tuple[list[float], int, list[float]]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    wrapped = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    one_step(wrapped, model.weight, 1.0)
    other_model, other = copy.deepcopy((model, wrapped))
    assert (
        type(other) is torch.optim.SGD and other.param_groups[0]["params"][0] is other_model.weight
    )
    with Submissions() as submissions:
        one_step(other, other_model.weight, 1.0 + hvd.rank())
    theirs = [other_model.weight.item(), other.state[other_model.weight]["momentum_buffer"].item()]
    ours = [one_step(wrapped, model.weight, 1.0 + hvd.rank()), model.weight.grad.item()]
    return theirs, len(submissions), ours


@pytest.mark.np(2)
def test_a_deep_copy_is_plain_local_and_leaves_the_original_alone(cluster: Cluster) -> None:
    ours = [-1.0 - 0.5 - 1.5, 1.5]
    assert cluster.run(deep_copy) == [([-2.5, 1.5], 0, ours), ([-3.5, 2.5], 0, ours)]


def pickled(kind: str) -> bytes:
    w = parameter(1.0)
    if kind == "no init":
        optimizer = NoTorchInit(torch.optim.SGD([w], lr=0.25))
    else:
        optimizer = torch.optim.SGD([w], lr=0.25, momentum=0.5)
    wrapped = hvd.DistributedOptimizer(optimizer, [("w", w)])
    one_step(wrapped, w, 1.0)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(wrapped, protocol)
        assert b"hvdtorch" not in data
        assert type(pickle.loads(data)) is (NoTorchInit if kind == "no init" else torch.optim.SGD)
    return data


@pytest.mark.np(2)
def test_a_pickle_needs_no_hvdtorch(cluster: Cluster) -> None:
    script = (
        "import pickle, sys\n"
        "optimizer = pickle.load(sys.stdin.buffer)\n"
        "(w,) = optimizer.param_groups[0]['params']\n"
        "optimizer.step()\n"
        "print(w.item(), optimizer.param_groups[0]['lr'], 'hvdtorch' in sys.modules)\n"
    )
    data = cluster.run(pickled, "SGD")[0]
    done = subprocess.run(
        [sys.executable, "-c", script], input=data, capture_output=True, check=True
    )
    assert done.stdout.split() == [b"0.75", b"0.25", b"False"]  # gradients are not in a pickle
    cluster.run(pickled, "no init")


def saved_model_without_warnings() -> None:
    import warnings

    w = torch.ones(2, requires_grad=True)  # no nn.Parameter: torch warns of hooks it cannot save
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(w, io.BytesIO())
        copy.deepcopy(w)
    optimizer.zero_grad()


@pytest.mark.np(2)
def test_parameters_can_be_saved_without_a_warning(cluster: Cluster) -> None:
    cluster.run(saved_model_without_warnings)


def released() -> list[bool]:
    w = parameter(0.0)
    optimizer = wrap({"w": w})
    push(1.0, w)
    refs = [weakref.ref(optimizer), weakref.ref(w)]
    gc.disable()
    del optimizer, w
    gone = [ref() is None for ref in refs]
    gc.enable()
    return gone


def test_nothing_keeps_an_optimizer_or_its_parameters_alive(cluster: Cluster) -> None:
    assert cluster.run(released) == [[True, True]] * cluster.size


# --- Names and arguments -----------------------------------------------------------------------


def operation_names() -> list[list[str]]:
    def names(optimizer, *parameters: nn.Parameter) -> list[str]:
        with Submissions() as submissions:
            push(1.0, *parameters)
        return submissions.gradients()

    seen = []
    a, b, extra = parameter(0.0), parameter(0.0), parameter(0.0)
    model = OrderedDict({"named.a": a, "named.tied": a, "named.b": b, "named.extra": extra})
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([b, a], lr=0.1), iter(model.items()))
    seen.append(names(optimizer, a, b))
    assert optimizer._parameter_names == {a: "named.a", b: "named.b"}
    optimizer.add_param_group({"params": [extra]})
    seen.append(names(optimizer, extra))
    optimizer.add_param_group({"params": [parameter(0.0), late := parameter(0.0)]})
    seen.append(names(optimizer, late))
    c, d = parameter(0.0), parameter(0.0)
    twin = hvd.DistributedOptimizer(torch.optim.SGD([c, d], lr=0.1), [("named.a", c), ("mine", d)])
    seen.append(names(twin, c, d))
    third = hvd.DistributedOptimizer(
        torch.optim.SGD([e := parameter(0.0)], lr=0.1), [("named.a", e)]
    )
    seen.append(names(third, e))
    return seen


@pytest.mark.np(2)
def test_operations_are_named_after_parameters(cluster: Cluster) -> None:
    for names in cluster.run(operation_names):
        assert names == [
            ["allreduce.named.a", "allreduce.named.b"],
            ["allreduce.named.extra"],
            ["allreduce.noname.2.1"],
            ["allreduce.optimizer1.mine", "allreduce.optimizer1.named.a"],
            ["allreduce.optimizer2.named.a"],
        ]


def unnamed() -> list[str]:
    a, b, c = parameter(0.0), parameter(0.0), parameter(0.0)
    sgd = torch.optim.SGD([{"params": [a]}, {"params": [b, c]}], lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd)
    with Submissions() as submissions:
        push(1.0, a, b, c)
    optimizer.step()
    return [name.rpartition("noname")[2] for name in submissions.gradients()]


@pytest.mark.np(2)
def test_without_names_parameters_are_numbered(cluster: Cluster) -> None:
    assert cluster.run(unnamed) == [[".0.0", ".1.0", ".1.1"]] * 2


def added_group() -> list[float]:
    a, b = parameter(0.0), parameter(0.0)
    optimizer = wrap({"a": a})
    push(1.0 + hvd.rank(), a)
    optimizer.step()
    optimizer.add_param_group({"params": [b], "lr": 1.0})
    optimizer.zero_grad()
    push(1.0 + hvd.rank(), a, b)
    optimizer.step()
    return [a.grad.item(), b.grad.item(), round(b.item(), 5)]


@pytest.mark.np(2)
def test_parameters_added_later_are_reduced(cluster: Cluster) -> None:
    assert cluster.run(added_group) == [[1.5, 1.5, -1.5]] * 2


def refused(case: str) -> None:
    w, v = parameter(0.0), parameter(0.0, 1.0)
    sgd = torch.optim.SGD([w, v], lr=0.1)
    named = [("w", w), ("v", v)]
    cases = {
        "no tuple": (ValueError, "Parameter", {"named_parameters": [w, v]}),
        "repeated": (ValueError, "'w'", {"named_parameters": [("w", w), ("w", v)]}),
        "lacks": (
            ValueError,
            r"number 1 of group 0 \(shape \[2\]\)",
            {"named_parameters": named[:1]},
        ),
        "passes": (ValueError, "positive", {"backward_passes_per_step": 0}),
        "predivide": (ValueError, "hvd.Average", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        "op": (ValueError, "hvd.Average", {"op": 17}),
        "adasum": (ValueError, "hvd.Average", {"gradient_predivide_factor": 2.0, "op": hvd.Adasum}),
        "set": (TypeError, "not registered", {"process_set": hvd.ProcessSet([0])}),
        "no set": (TypeError, "hvd.ProcessSet", {"process_set": [0]}),
        "compression": (TypeError, "no methods compress", {"compression": "fp16"}),
        "part of a pass": (TypeError, "an int, not 1.5", {"backward_passes_per_step": 1.5}),
        "yes passes": (TypeError, "an int, not True", {"backward_passes_per_step": True}),
        "factor": (TypeError, "a number, not '2'", {"gradient_predivide_factor": "2"}),
        "yes groups": (TypeError, "an int or a list", {"groups": True}),
        "strange member": (ValueError, "not a parameter", {"groups": [[w, parameter(0.0)]]}),
    }
    kind, text, options = cases[case]
    with pytest.raises(kind, match=text):
        hvd.DistributedOptimizer(sgd, **{"named_parameters": named, **options})
    assert type(sgd) is torch.optim.SGD and not w._backward_hooks
    hvd.DistributedOptimizer(sgd, named)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(sgd, named)


@pytest.mark.np(1, 2)
@pytest.mark.parametrize(
    "case",
    [
        "no tuple",
        "repeated",
        "lacks",
        "passes",
        "predivide",
        "op",
        "adasum",
        "set",
        "no set",
        "compression",
        "part of a pass",
        "yes passes",
        "factor",
        "yes groups",
        "strange member",
    ],
)
def test_arguments_that_are_refused_change_nothing(cluster: Cluster, case: str) -> None:
    cluster.run(refused, case)


def test_a_model_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer"):
        hvd.DistributedOptimizer(nn.Linear(1, 1))


def attributes() -> None:
    w, frozen = parameter(0.0), parameter(0.0)
    frozen.requires_grad_(False)
    named = {"w": w, "frozen": frozen}
    optimizer = wrap(named, backward_passes_per_step=3, gradient_predivide_factor=2.0)
    assert optimizer.backward_passes_per_step == 3
    assert optimizer.op == hvd.Average
    assert optimizer.gradient_predivide_factor == 2.0
    assert optimizer.sparse_as_dense is False
    assert optimizer.process_set is hvd.global_process_set
    assert optimizer._parameter_names == {w: "w", frozen: "frozen"}
    assert optimizer._handles == {}
    assert optimizer._requires_update == ({w} if hvd.size() > 1 else set())


@pytest.mark.np(1, 2)
def test_attributes(cluster: Cluster) -> None:
    cluster.run(attributes)


def alone() -> tuple[float, int]:
    w = parameter(0.0)
    optimizer = wrap({"w": w}, backward_passes_per_step=4)
    with Submissions() as submissions:
        push(1.0, w)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        optimizer.add_param_group({"params": [parameter(0.0)]})
    assert not w._backward_hooks and not w._post_accumulate_grad_hooks
    return round(w.item(), 5), len(submissions)


@pytest.mark.np(1)
def test_at_size_one_it_is_the_plain_optimizer(cluster: Cluster) -> None:
    assert cluster.run(alone) == [(-0.1, 0)]
