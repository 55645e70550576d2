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
