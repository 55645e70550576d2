"""DistributedOptimizer: errors are the same on all ranks, and the job goes on."""

import threading

import pytest
import torch
from support.cluster import Cluster, RankFailure
from support.gradients import parameter, push, wrap
from torch import Tensor, nn

import hvdtorch as hvd


def disagreeing(what: str) -> tuple[str, float]:
    mine = hvd.rank() == 1
    a, b = parameter(0.0), parameter(0.0, 0.0)
    names = {"name": ("x", "B") if mine else ("x", "b")}.get(what, ("x", "b"))
    options = {"backward_passes_per_step": 2} if what == "passes" and mine else {}
    named = {f"disagree.{what}.{name}": p for name, p in zip(names, (a, b), strict=True)}
    if what == "count" and mine:
        named.popitem()
    if what == "order" and mine:
        named = dict(reversed(named.items()))
    optimizer = wrap(named, **options)
    with pytest.raises(hvd.HorovodInternalError) as error:
        push(1.0, a, b)
        optimizer.step()
    text = str(error.value)
    del optimizer, error
    healthy = wrap({f"disagree.{what}.afterwards": a})
    push(1.0 + hvd.rank(), a)
    healthy.step()
    return text, a.grad.item()


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("what", ["name", "passes", "count", "order"])
def test_ranks_that_wrapped_different_things_are_told_the_first_difference(
    cluster: Cluster, what: str
) -> None:
    texts, gradients = zip(*cluster.run(disagreeing, what), strict=True)
    assert len(set(texts)) == 1 and len(set(gradients)) == 1
    assert "on rank 0" in texts[0] and "on rank 1" in texts[0]
    number = 0 if what in ("passes", "order") else 1
    assert f"number {number} is" in texts[0]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise RuntimeError("half way")


def backward_that_raises(set_to_none: bool, op: int, compression: str) -> list[float]:
    early, late = parameter(0.0), parameter(0.0)
    compressor = getattr(hvd.Compression, compression)
    optimizer = wrap({"early": early, "late": late}, op=op, compression=compressor)
    optimizer.step()  # the ranks agree, so the next pass launches what is ready
    with pytest.raises(RuntimeError, match="half way"):
        (Fails.apply(late) * 1.0 + early * 5.0).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    seen = []
    for _ in range(2):
        push(1.0 + hvd.rank(), early, late)
        optimizer.step()
        seen += [early.grad.item(), late.grad.item()]
        optimizer.zero_grad(set_to_none=set_to_none)
    return seen


@pytest.mark.np(2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("op", "expected"), [(hvd.Average, 1.5), (hvd.Sum, 3.0)])
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_a_backward_that_raised_half_way_does_not_disturb_the_next(
    cluster: Cluster, set_to_none: bool, op: int, expected: float, compression: str
) -> None:
    got = cluster.run(backward_that_raises, set_to_none, op, compression)
    assert got == [[expected] * 4] * 2


def raising_on_rank_0(early_reached: bool, op: int, groups: int | None) -> list[object]:
    """Rank 0 skips a pass, which raised when `early` had fired. Errors, and the weights at last."""
    early, late = parameter(0.0), parameter(0.0)
    optimizer = wrap({"one.early": early, "one.late": late}, op=op, groups=groups)
    errors = []
    for number in range(4 if hvd.rank() == 0 else 3):
        optimizer.zero_grad()
        fails = number == 1 and hvd.rank() == 0
        loss = (Fails.apply(late) if fails else late) * (1.0 + number)
        if early_reached or fails or number != 1:
            loss = loss + early * (5.0 + number)
        try:
            loss.sum().backward()
            optimizer.step()
        except hvd.HorovodInternalError as error:
            errors.append(f"{error} {early.grad} {late.grad}")
        except RuntimeError as error:
            assert str(error) == "half way"
    return [errors, early.item(), late.item()]


@pytest.mark.np(2)
@pytest.mark.parametrize("early_reached", [True, False])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_backward_that_raised_on_one_rank_is_an_error_on_all(
    cluster: Cluster, early_reached: bool, op: int
) -> None:
    one, other = cluster.run(raising_on_rank_0, early_reached, op, None)
    assert one == other
    (text,) = one[0]
    assert text.startswith("an earlier backward() raised on rank 0 while")
    assert text.endswith("None None")
    factor = 0.1 if op == hvd.Sum else 0.05
    assert one[1:] == pytest.approx([-factor * (5 + 5 + 8 + 7), -factor * (1 + 1 + 4 + 3)])


@pytest.mark.np(2)
def test_a_group_that_was_not_launched_is_left_by_no_backward(cluster: Cluster) -> None:
    one, other = cluster.run(raising_on_rank_0, True, hvd.Average, 1)
    assert one == other and one[0] == []


def raising_in_different_places() -> tuple[str, list[float]]:
    """All ranks' passes raise, rank 1's before a gradient that rank 0 has launched."""
    a, b, c = parameter(0.0), parameter(0.0), parameter(0.0)
    optimizer = wrap({"places.a": a, "places.b": b, "places.c": c})
    optimizer.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="half way"):
            loss = Fails.apply(a) * 1.0
            loss = loss + c * 1.0 + (0.0 if hvd.rank() else b * 1.0)
            loss.sum().backward()
        optimizer.zero_grad()
        with pytest.raises(hvd.HorovodInternalError) as error:
            push(1.0 + hvd.rank(), a, b, c)
    push(1.0 + hvd.rank(), a, b, c)
    return str(error.value), [p.grad.item() for p in (a, b, c)]


@pytest.mark.np(2)
def test_backward_passes_that_raised_in_different_places(cluster: Cluster) -> None:
    one, other = cluster.run(raising_in_different_places)
    assert one == other and one[1] == [1.5] * 3
    assert "raised on ranks 0, 1 while" in one[0]


def disagreeing_again(how: str) -> tuple[list[str], float]:
    """Ranks that disagree, pass after pass; then they agree again."""
    mine = hvd.rank() == 1
    named = {f"again.{how}.{i}": parameter(0.0) for i in range(3 if how == "more" and mine else 2)}
    parameters = list(named.values())
    groups = 1 if how == "groups" and mine else None
    optimizer = wrap(named, groups=groups)
    if how == "changed":
        push(1.0, *parameters)
        optimizer.step()
        optimizer.zero_grad()
        if mine:
            optimizer.set_backward_passes_per_step(2)
    texts = []
    for _ in range(3):
        with pytest.raises(hvd.HorovodInternalError) as error:
            push(1.0, *parameters)
            optimizer.step()
        optimizer.zero_grad()
        texts.append(str(error.value))
    if how == "changed":
        optimizer.set_backward_passes_per_step(1)
        with pytest.raises(hvd.HorovodInternalError, match=r"raised on rank 0 while"):
            push(1.0, *parameters)  # rank 0 had launched when they disagreed first
    else:
        del optimizer, error
        optimizer = wrap({f"again.{how}.healthy": parameters[0]})
    optimizer.zero_grad()
    push(1.0 + hvd.rank(), parameters[0])
    return texts, parameters[0].grad.item()


@pytest.mark.np(2)
@pytest.mark.parametrize("how", ["more", "groups", "changed"])
def test_ranks_that_go_on_disagreeing_get_the_same_error_again(cluster: Cluster, how: str) -> None:
    one, other = cluster.run(disagreeing_again, how)
    assert one == other and one[1] == 1.5
    assert len(set(one[0])) == 1 and "the ranks disagree about the gradients" in one[0][0]
    what = {"more": "nothing", "groups": "in group 0", "changed": "backward_passes_per_step=2"}
    assert what[how] in one[0][0]


def fails_on_all_ranks() -> None:
    w = parameter(0.0) if hvd.rank() == 0 else nn.Parameter(torch.zeros(1, dtype=torch.float64))
    named = {"dtypes": w}
    optimizer = wrap(named)
    push(1.0, w)
    optimizer.step()


@pytest.mark.np(2)
def test_errors_of_a_reduction_surface_in_backward(cluster: Cluster) -> None:
    with pytest.raises(RankFailure) as failure:
        cluster.run(fails_on_all_ranks)
    texts = {str(error) for error in failure.value.errors.values()}
    assert len(failure.value.errors) == 2 and len(texts) == 1
    assert "float32" in texts.pop()


def overtaken() -> tuple[str, list[float]]:
    """A thread's backward() is held up after `v` has fired, until the main thread's is over."""
    w, v, x = parameter(0.0), parameter(0.0), parameter(0.0)
    optimizer = wrap({"threads.w": w, "threads.v": v})
    inside, over = threading.Event(), threading.Event()
    errors: list[str] = []

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            inside.set()
            assert v.grad is not None and over.wait(20)
            return gradient

    def run() -> None:
        try:
            (Block.apply(x) + v).sum().backward()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(20)
    push(1.0 + hvd.rank(), w)
    over.set()
    thread.join(20)
    seen = [w.grad.item()]
    optimizer.zero_grad()
    push(1.0 + hvd.rank(), w, v)
    optimizer.step()
    return "\n".join(errors), [*seen, w.grad.item(), v.grad.item()]


@pytest.mark.np(2)
def test_backward_passes_of_two_threads_must_not_overlap(cluster: Cluster) -> None:
    for error, gradients in cluster.run(overtaken):
        assert error.startswith("two threads ran backward() at the same time")
        assert gradients == [1.5] * 3
