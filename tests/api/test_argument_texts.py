"""Arguments of a wrong type or value: the error names function, argument and value."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.checks import same

import hvdtorch as hvd
import hvdtorch.torch

REDUCTIONS = (
    *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "reducescatter"),
    "reducescatter_async",
)
GROUPED = (
    *("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async"),
    *("grouped_allreduce_async_", "grouped_allgather", "grouped_allgather_async"),
    *("grouped_reducescatter", "grouped_reducescatter_async"),
)
BROADCASTS = ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Case = tuple[Callable[[], Any], type[Exception], str]


def still_in_step() -> None:
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))


def check(cases: list[Case]) -> None:
    for call, kind, text in cases:
        with pytest.raises(kind, match=re.escape(text)):
            call()
    still_in_step()


def factors() -> None:
    cases: list[Case] = []
    for name in REDUCTIONS:
        function = getattr(hvd, name)
        for argument in ("prescale_factor", "postscale_factor"):
            for value in (None, "2", 1j, [1.0], torch.ones(2)):
                cases.append(
                    (
                        lambda f=function, a=argument, v=value: f(torch.ones(2), **{a: v}),
                        TypeError,
                        f"{name}: {argument} must be a real number, not {value!r}",
                    )
                )
            for dtype in INTEGERS:
                for value in (float("inf"), float("nan")):
                    cases.append(
                        (
                            lambda f=function, a=argument, v=value, d=dtype: f(
                                torch.ones(2, dtype=d), op=hvd.Sum, **{a: v}
                            ),
                            ValueError,
                            f"{name}: {argument}={value}, and integers cannot be scaled",
                        )
                    )
    check(cases)
    size = float(hvd.size())
    for value in (2, numpy.float32(2), torch.tensor(2.0), numpy.int64(2), True + 1):
        same(
            hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=value),
            torch.full((2,), 2 * size),
        )
    infinite = hvd.allreduce(torch.ones(2), op=hvd.Sum, postscale_factor=float("inf"))
    assert infinite.isinf().all()


def groups() -> None:
    cases: list[Case] = []
    for name in GROUPED:
        function = getattr(hvd, name)
        for value in (None, 3):
            cases.append(
                (
                    lambda f=function, v=value: f(v),
                    TypeError,
                    f"{name}: tensors must be a list of tensors, not {value!r}",
                )
            )
        cases.append(
            (
                lambda f=function: f([torch.ones(1), torch.ones(1), 2.0]),
                TypeError,
                f"{name}: tensors[2]: expected a torch.Tensor, got float",
            )
        )
        if "allreduce" not in name:
            cases.append(
                (
                    lambda f=function: f([torch.ones(1), torch.tensor(1.0)]),
                    ValueError,
                    f"{name}: tensors[1]: a 0-dim tensor has no rows",
                )
            )
        if name.endswith("_"):
            cases.append(
                (
                    lambda f=function: f([torch.ones(1), torch.ones(1).expand(3)]),
                    ValueError,
                    f"{name}: tensors[1]: cannot write into a tensor whose elements share memory",
                )
            )
    check(cases)


def roots() -> None:
    parameters = {"a": torch.ones(1)}
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    calls = {name: lambda r, n=name: getattr(hvd, n)(torch.ones(1), r) for name in BROADCASTS}
    calls["broadcast_object"] = lambda r: hvd.broadcast_object(1, r)
    calls["broadcast_parameters"] = lambda r: hvd.broadcast_parameters(parameters, r)
    calls["broadcast_optimizer_state"] = lambda r: hvd.broadcast_optimizer_state(optimizer, r)
    cases: list[Case] = []
    for name, call in calls.items():
        for root in (None, "0", 0.0):
            text = f"{name}: root_rank must be a global rank as an int, not {root!r}"
            cases.append((lambda c=call, r=root: c(r), TypeError, text))
        for root in (-1, hvd.size()):
            text = f"{name}: root_rank {root} is not a member of ProcessSet"
            cases.append((lambda c=call, r=root: c(r), ValueError, text))
    for wrong in (None, torch.nn.Linear(1, 1)):
        text = f"broadcast_optimizer_state: optimizer must be a torch.optim.Optimizer, not {wrong}"
        cases.append((lambda w=wrong: hvd.broadcast_optimizer_state(w, 0), TypeError, text))
    check(cases)


def process_sets() -> None:
    everyone: Any = hvd.global_process_set
    registered = "use the object that was registered, or call hvd.remove_process_set()"
    cases: list[Case] = [
        (lambda: hvd.ProcessSet(everyone), TypeError, "ProcessSet takes a list of ranks, as in "),
        (lambda: hvd.ProcessSet(everyone), TypeError, f"not {everyone}"),
        (lambda: hvd.add_process_set(everyone), ValueError, "use it as it is"),
        (
            lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])),
            TypeError,
            "must call hvd.add_process_set() with it first",
        ),
    ]
    for wrong in (None, 5):
        cases += [
            (lambda w=wrong: hvd.ProcessSet(w), TypeError, f"or a communicator, not {wrong}"),
            (
                lambda w=wrong: hvd.add_process_set(w),
                TypeError,
                f"add_process_set: pass a hvd.ProcessSet or a list of ranks, not {wrong}",
            ),
        ]
    for wrong in (None, 5, [0]):
        text = f"remove_process_set: pass the hvd.ProcessSet that was registered, not {wrong}"
        cases.append((lambda w=wrong: hvd.remove_process_set(w), TypeError, text))
    check(cases)
    if hvd.size() > 1:
        first = hvd.add_process_set([0])
        check([(lambda: hvd.add_process_set([0]), ValueError, registered)])
        assert hvd.remove_process_set(first)


def others() -> None:
    rows = torch.ones(4)
    splits = [1] * hvd.size()
    splits[-1] = -3
    cases: list[Case] = [
        (
            lambda: hvd.alltoall(rows, splits),
            ValueError,
            f"splits[{hvd.size() - 1}] is negative: -3",
        ),
    ]
    for wrong in ("x", None, 1.0):
        cases.append(
            (lambda w=wrong: hvd.join(w), TypeError, f"join: device must be an int, not {wrong!r}")
        )
    windows = torch.zeros(4).as_strided((3, 2), (1, 1))
    turned = torch.zeros(2, 3, 4).permute(2, 0, 1)
    for name in ("allreduce_", "allreduce_async_", "broadcast_", "broadcast_async_"):
        more = (0,) if "broadcast" in name else ()
        for tensor in (windows, torch.zeros(5).unfold(0, 3, 1), torch.zeros(1).expand(2)):
            text = f"{name}: cannot write into a tensor whose elements share memory"
            call = lambda n=name, t=tensor, m=more: getattr(hvd, n)(t, *m)  # noqa: E731
            cases.append((call, ValueError, text))
    check(cases)
    for fine in (turned, torch.zeros(4, 4)[::2, ::2], torch.zeros(5, 1).expand(5, 1).t()):
        assert hvd.allreduce_(fine) is fine
    same(hvd.allreduce(windows), torch.zeros(3, 2))


@pytest.mark.np(1, 2)
@pytest.mark.parametrize("case", [factors, groups, roots, process_sets, others])
def test_arguments(cluster, case):
    cluster.run(case)


def join_twice(refused: Path) -> None:
    """Rank 1 joins in two threads at once; rank 0 when one of them has been refused."""
    outcomes: list[object] = []

    def join() -> None:
        try:
            outcomes.append(hvd.join())
        except ValueError as error:
            outcomes.append(str(error))
            refused.touch()

    if hvd.rank() == 1:
        threads = [threading.Thread(target=join) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        text, last = outcomes
        assert last == 0
        assert "join: this rank is already in hvd.join()" in str(text)
    else:
        while not refused.exists():
            time.sleep(0.01)
        assert hvd.join() == 0
    still_in_step()


@pytest.mark.np(2)
def test_join_in_two_threads(cluster, tmp_path):
    cluster.run(join_twice, tmp_path / "refused")


def optimizer_state_on_one_rank() -> str:
    """A rank that passes no optimizer does not leave the others waiting."""
    optimizer: Any = torch.optim.SGD([torch.ones(1)], lr=0.1) if hvd.rank() else None
    with pytest.raises((TypeError, ValueError)) as caught:
        hvd.broadcast_optimizer_state(optimizer, 0)
    still_in_step()
    return str(caught.value)


@pytest.mark.np(2)
def test_all_ranks_are_told_of_what_is_no_optimizer(cluster):
    texts = cluster.run(optimizer_state_on_one_rank)
    assert "must be a torch.optim.Optimizer, not None" in texts[0]
    assert "rank 0 raised TypeError: broadcast_optimizer_state: optimizer must" in texts[1]


def test_what_is_not_there_yet_says_so() -> None:
    for module in (hvd, hvdtorch.torch):
        for name, what in (
            ("elastic", "elastic training"),
            ("start_timeline", "the timeline"),
            ("stop_timeline", "the timeline"),
        ):
            with pytest.raises(AttributeError, match=f"{name!r}: {what} is not available"):
                getattr(module, name)
            assert not hasattr(module, name)
        with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
            _ = module.nonsense
