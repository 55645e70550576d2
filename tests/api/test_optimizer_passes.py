"""DistributedOptimizer: accumulation over backward passes, zero_grad, synchronize and step."""

import warnings

import pytest
import torch
from support.cluster import Cluster
from support.gradients import Submissions, parameter, push, synchronize_and_step, wrap
from torch import nn

import hvdtorch as hvd


def leftovers(second_step: bool, explicit: bool) -> tuple[list[float], list[int]]:
    """8 passes per step, 10 microbatches per epoch, 2 epochs; microbatch i has gradient i + 1 + r.

    Returns what each step applied, and how many gradients each epoch reduced.
    """
    w = parameter(0.0)
    optimizer = wrap({"w": w}, backward_passes_per_step=8)
    applied, reductions = [], []

    def step() -> None:
        synchronize_and_step(optimizer, explicit)
        applied.append(w.grad.item())
        optimizer.zero_grad()

    for _ in range(2):
        with Submissions() as submissions:
            for i in range(10):
                push(i + 1.0 + hvd.rank(), w)
                if i == 7:
                    step()
            if second_step:
                step()
        reductions.append(len(submissions.gradients()))
    return applied, reductions


@pytest.mark.np(2)
@pytest.mark.parametrize("explicit", [False, True])
def test_left_over_microbatches_are_reduced_by_the_step_after_them(
    cluster: Cluster, explicit: bool
) -> None:
    first, rest = sum(range(1, 9)) + 8 * 0.5, 9 + 10 + 2 * 0.5
    both = ([first, rest] * 2, [2, 2])
    assert cluster.run(leftovers, True, explicit) == [both] * 2
    # Without the second step: passes 9 and 10 count as the first two of the next eight, which are
    # complete at the sixth microbatch of epoch 2; the step after the eighth reduces the other two.
    all_ten = ([first, first + rest], [1, 2])
    assert cluster.run(leftovers, False, explicit) == [all_ten] * 2


def accumulated(op: int, passes: int) -> tuple[list[float], int, int]:
    w, other = parameter(0.0), parameter(0.0)
    optimizer = wrap({"w": w, "other": other}, op=op, backward_passes_per_step=passes)
    seen = []
    with Submissions() as early:
        for i in range(passes - 1):
            push(i + 1.0 + hvd.rank(), w)
            seen.append(w.grad.item())
    with Submissions() as late:
        push(passes + hvd.rank(), other)  # what fires in the due pass need not be what fired before
    seen.append(w.grad.item())
    optimizer.step()
    return seen, len(early), len(late.gradients())


@pytest.mark.np(2)
@pytest.mark.parametrize(("op", "factor"), [(hvd.Average, 0.5), (hvd.Sum, 1.0)])
def test_passes_accumulate_locally_and_are_reduced_once(
    cluster: Cluster, op: int, factor: float
) -> None:
    assert cluster.run(accumulated, op, 3) == [
        ([1.0, 3.0, (3.0 + 5.0) * factor], 0, 2),
        ([2.0, 5.0, (3.0 + 5.0) * factor], 0, 2),
    ]


def accumulated_on_reduced(op: int, drop: str) -> list[float]:
    """Two due passes without a zero_grad() between them; the user may drop gradients on the way."""
    w = parameter(0.0)
    optimizer = wrap({"w": w}, op=op, backward_passes_per_step=2)
    for i in range(4):
        push(10.0**i * (1 + hvd.rank()), w)
        if i == 2 and drop == "grad":
            w.grad = None
        if i == 2 and drop in ("None", "zeros"):
            optimizer.zero_grad(set_to_none=drop == "None")
    seen = [w.grad.item()]
    optimizer.step()
    return [*seen, w.grad.item()]


@pytest.mark.np(2)
@pytest.mark.parametrize(("op", "factor"), [(hvd.Average, 1.5), (hvd.Sum, 3.0)])
def test_accumulating_on_top_of_reduced_gradients(cluster: Cluster, op: int, factor: float) -> None:
    run = cluster.run
    assert run(accumulated_on_reduced, op, "") == [[1111 * factor] * 2] * 2
    assert run(accumulated_on_reduced, op, "grad") == [[1000 * factor] * 2] * 2
    # zero_grad() starts the count anew: the fourth pass is a first one, reduced by step().
    for drop in ("None", "zeros"):
        got = run(accumulated_on_reduced, op, drop)
        assert got == [[1000.0, 1000 * factor], [2000.0, 1000 * factor]]


def one_rank_fires_less_often() -> list[float]:
    w = parameter(0.0)
    optimizer = wrap({"w": w}, backward_passes_per_step=2)
    applied = []
    for _ in range(3):
        push(2.0, w)
        if hvd.rank() == 0:
            push(4.0, w)
        optimizer.step()
        applied.append(w.grad.item())
        optimizer.zero_grad()
    return applied


@pytest.mark.np(2)
def test_a_rank_with_fewer_passes_meets_the_others_in_its_step(cluster: Cluster) -> None:
    assert cluster.run(one_rank_fires_less_often) == [[4.0] * 3] * 2


def different_groups_due() -> list[float]:
    """Two passes per step; rank 1's first pass reaches one head, its second the other."""
    trunk, a, b = parameter(0.0), parameter(0.0), parameter(0.0)
    named = {"trunk": trunk, "a": a, "b": b}
    optimizers = [wrap({name: p}, backward_passes_per_step=2) for name, p in named.items()]
    seen = []
    for _ in range(2):
        for turn in range(2):
            push(2.0 + turn, trunk, a if hvd.rank() == 0 or turn else b)
        for optimizer in optimizers:
            optimizer.step()
        seen += [p.grad.item() for p in named.values()]
        for optimizer in optimizers:
            optimizer.zero_grad()
    return seen


@pytest.mark.np(2)
def test_what_is_due_on_one_rank_is_reduced_on_all(cluster: Cluster) -> None:
    assert cluster.run(different_groups_due) == [[5.0, (2.0 + 3.0 + 3.0) / 2, 2.0 / 2] * 2] * 2


def changed_passes() -> list[float]:
    w = parameter(0.0)
    optimizer = wrap({"w": w})
    seen = [float(optimizer.backward_passes_per_step)]
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        push(1.0 + hvd.rank(), w)
        seen.append(w.grad.item())
    optimizer.step()
    with pytest.raises(ValueError, match="positive"):
        optimizer.set_backward_passes_per_step(0)
    return [*seen, float(optimizer.backward_passes_per_step)]


@pytest.mark.np(2)
def test_passes_per_step_can_be_changed(cluster: Cluster) -> None:
    assert cluster.run(changed_passes) == [[1.0, 1.0, 3.0, 2.0], [1.0, 2.0, 3.0, 2.0]]


# --- zero_grad ---------------------------------------------------------------------------------


def zeroed_anywhere(set_to_none: bool, passes: int) -> list[float | None]:
    w = parameter(0.0)
    optimizer = wrap({"w": w}, backward_passes_per_step=passes)
    seen = []
    optimizer.zero_grad(set_to_none=set_to_none)  # before the first backward
    push(1.0 + hvd.rank(), w)
    optimizer.zero_grad(set_to_none=set_to_none)  # after a backward, no step
    seen.append(w.grad if w.grad is None else w.grad.item())
    for _ in range(passes):
        push(3.0 + hvd.rank(), w)
    seen.append(w.grad.item())
    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    seen.append(w.grad if w.grad is None else w.grad.item())
    optimizer.zero_grad(set_to_none)  # positional, after a step
    for _ in range(passes):
        push(5.0 + hvd.rank(), w)
    optimizer.step()
    return [*seen, w.grad.item()]


@pytest.mark.np(2)
@pytest.mark.parametrize("passes", [1, 3])
def test_zero_grad_is_legal_at_any_time(cluster: Cluster, passes: int) -> None:
    means = [3.5 * passes, 5.5 * passes]
    expected = [None, means[0], None, means[1]]
    assert cluster.run(zeroed_anywhere, True, passes) == [expected] * 2
    expected = [0.0, means[0], 0.0, means[1]]
    assert cluster.run(zeroed_anywhere, False, passes) == [expected] * 2


# --- synchronize and step ----------------------------------------------------------------------


def warned(calls: str) -> tuple[list[str], float, int]:
    """`calls`: b(ackward), y (synchronize), s(tep), k (step inside skip_synchronize)."""
    w = parameter(0.0)
    optimizer = wrap({"w": w}, op=hvd.Sum)
    with Submissions() as submissions, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            if call == "b":
                optimizer.zero_grad()
                push(1.0 + hvd.rank(), w)
            elif call == "y":
                optimizer.synchronize()
            elif call == "s":
                optimizer.step()
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
    texts = [str(w.message) for w in caught if "skip_synchronize" in str(w.message)]
    assert all(w.filename == __file__ for w in caught)
    return texts, w.grad.item(), len(submissions.gradients())


@pytest.mark.np(2)
@pytest.mark.parametrize(
    ("calls", "warnings"),
    [("bs", 0), ("bysbsbys", 2), ("byk", 0), ("bykbs", 0), ("byys", 1), ("bykbys", 1)],
)
def test_synchronize_then_plain_step_warns_and_reduces_once(
    cluster: Cluster, calls: str, warnings: int
) -> None:
    for texts, gradient, reductions in cluster.run(warned, calls):
        start = "optimizer.step() called without optimizer.skip_synchronize()"
        assert len(texts) == warnings and all(text.startswith(start) for text in texts)
        assert (gradient, reductions) == (3.0, calls.count("b"))


def ordinary_step() -> list[int]:
    w = parameter(0.0)
    optimizer = wrap({"w": w})
    counts = []
    for _ in range(2):
        push(1.0, w)
        with Submissions() as submissions:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_([w], 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        counts.append(len(submissions))
        push(1.0, w)
        with Submissions() as submissions:
            optimizer.step()
        counts.append(len(submissions))
    return counts


def test_ordinarily_step_and_synchronize_communicate_nothing(cluster: Cluster) -> None:
    assert cluster.run(ordinary_step) == [[0] * 4] * cluster.size


def steps_without_backward() -> tuple[object, float]:
    w = parameter(1.0)
    optimizer = wrap({"w": w})
    optimizer.step()
    optimizer.step()
    grad = w.grad
    push(1.0 + hvd.rank(), w)
    optimizer.step()
    return grad, w.grad.item()


@pytest.mark.np(2)
def test_steps_without_backward_change_nothing(cluster: Cluster) -> None:
    assert cluster.run(steps_without_backward) == [(None, 1.5)] * 2


def skipped_leftovers() -> list[float]:
    w = parameter(0.0)
    optimizer = wrap({"w": w}, backward_passes_per_step=3)
    push(1.0 + hvd.rank(), w)
    with optimizer.skip_synchronize():
        optimizer.step()
    seen = [w.grad.item()]
    optimizer.step()
    return [*seen, w.grad.item()]


@pytest.mark.np(2)
def test_inside_skip_synchronize_step_reduces_nothing(cluster: Cluster) -> None:
    assert cluster.run(skipped_leftovers) == [[1.0, 1.5], [2.0, 1.5]]


def gradient_replaced_by_hand() -> list[float]:
    w = parameter(0.0)
    optimizer = wrap({"w": w}, backward_passes_per_step=2)
    push(1.0, w)
    w.grad = torch.full_like(w, 10.0 + hvd.rank())
    push(1.0, w)
    seen = [w.grad.item()]
    w.grad = torch.full_like(w, 7.0)
    optimizer.step()
    return [*seen, round(w.item(), 5)]


@pytest.mark.np(2)
def test_the_gradient_may_be_replaced_by_hand(cluster: Cluster) -> None:
    assert cluster.run(gradient_replaced_by_hand) == [[11.5, -0.7]] * 2
