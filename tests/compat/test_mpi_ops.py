"""What `horovod.torch.mpi_ops` has besides the public API."""

import pytest
import torch
from support.cluster import Cluster
from support.scripts import run_script

import hvdtorch.torch as hvd
from hvdtorch import basics
from hvdtorch.compat import autograd

SET = hvd.global_process_set


def gradient(function, *tensors: torch.Tensor) -> list:
    """The outputs of a function, and the gradients of its inputs for a loss with many values."""
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    found = function(*inputs)
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    outputs = [output for output in outputs if output.requires_grad]
    loss = sum((o * torch.arange(1.0, o.numel() + 1).reshape(o.shape)).sum() for o in outputs)
    (loss * (hvd.rank() + 1)).backward()
    return [t.detach().tolist() for t in outputs] + [t.grad.tolist() for t in inputs]


def both_ways(kind: str) -> tuple[list, list]:
    """Through the class, and through the public function."""
    size = hvd.size()
    a = torch.arange(2.0 * size).reshape(size, 2) + hvd.rank()
    b = torch.ones(size, 3) * (hvd.rank() + 1)
    calls = {
        "Allreduce": (
            lambda x: autograd.HorovodAllreduce.apply(x, None, "n", hvd.Sum, 2.0, 0.5, SET),
            lambda x: hvd.allreduce(
                x, name="n", op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5
            ),
            [a],
        ),
        "GroupedAllreduce": (
            lambda *x: autograd.HorovodGroupedAllreduce.apply(
                None, "n", hvd.Sum, 2.0, 0.5, SET, *x
            ),
            lambda *x: hvd.grouped_allreduce(
                x, name="n", op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5
            ),
            [a, b],
        ),
        "Allgather": (
            lambda x: autograd.HorovodAllgather.apply(x, "n", SET),
            lambda x: hvd.allgather(x, name="n"),
            [a],
        ),
        "GroupedAllgather": (
            lambda *x: autograd.HorovodGroupedAllgather.apply("n", SET, *x),
            lambda *x: hvd.grouped_allgather(x, name="n"),
            [a, b],
        ),
        "Broadcast": (
            lambda x: autograd.HorovodBroadcast.apply(x, size - 1, "n", SET),
            lambda x: hvd.broadcast(x, size - 1, name="n"),
            [a],
        ),
        "Alltoall": (
            lambda x: autograd.HorovodAlltoall.apply(x, [1] * size, "n", SET),
            lambda x: hvd.alltoall(x, splits=[1] * size, name="n"),
            [a],
        ),
        "Reducescatter": (
            lambda x: autograd.HorovodReducescatter.apply(x, "n", hvd.Sum, SET, 2.0, 0.5),
            lambda x: hvd.reducescatter(
                x, name="n", op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5
            ),
            [a],
        ),
        "GroupedReducescatter": (
            lambda *x: autograd.HorovodGroupedReducescatter.apply("n", hvd.Sum, SET, 2.0, 0.5, *x),
            lambda *x: hvd.grouped_reducescatter(
                x, name="n", op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5
            ),
            [a, b],
        ),
    }
    by_class, by_function, tensors = calls[kind]
    return gradient(by_class, *tensors), gradient(by_function, *tensors)


@pytest.mark.np(2, 3)
@pytest.mark.parametrize(
    "kind",
    [
        *("Allreduce", "GroupedAllreduce", "Allgather", "GroupedAllgather", "Broadcast"),
        *("Alltoall", "Reducescatter", "GroupedReducescatter"),
    ],
)
def test_a_class_does_what_the_function_does(cluster: Cluster, kind: str) -> None:
    for by_class, by_function in cluster.run(both_ways, kind):
        assert by_class == by_function


def test_average_and_op() -> None:
    op = autograd.handle_average_backwards_compatibility
    assert op(None, None) == hvd.Average
    assert op(hvd.Max, None) == hvd.Max
    with pytest.warns(DeprecationWarning, match="average= is deprecated") as warned:
        assert op(None, True) == hvd.Average
        assert op(None, False) == hvd.Sum
    assert {warning.filename for warning in warned} == {__file__}
    with pytest.raises(ValueError, match="either op or average"):
        op(hvd.Sum, True)


# ---- is_homogeneous ----


def is_homogeneous() -> bool:
    return basics.is_homogeneous()


def test_one_host_is_homogeneous(cluster: Cluster) -> None:
    assert cluster.run(is_homogeneous) == [True] * cluster.size


@pytest.mark.parametrize(("hosts", "answer"), [("aab", False), ("ab", True), ("aabb", True)])
def test_hosts_of_different_sizes_are_not_homogeneous(hosts: str, answer: bool) -> None:
    script = f"""
import os
rank = int(os.environ["RANK"])
os.environ["HVDTORCH_HOST_ID"] = host = {hosts!r}[rank]
os.environ["LOCAL_RANK"] = str({hosts!r}[:rank].count(host))
os.environ["LOCAL_WORLD_SIZE"] = str({hosts!r}.count(host))
import hvdtorch as hvd
from hvdtorch.basics import is_homogeneous
hvd.init()
print(is_homogeneous())
hvd.shutdown()
"""
    result = run_script(len(hosts), script)
    assert result.returncode == 0, result.stdout
    assert result.outputs == [f"{answer}\n"] * len(hosts)


def test_is_homogeneous_needs_init() -> None:
    with pytest.raises(ValueError, match="not initialized"):
        basics.is_homogeneous()


# ---- the second optimizer class ----


def is_adasum(op: int) -> bool:
    from hvdtorch.compat.adasum import _DistributedAdasumOptimizer

    parameter = torch.nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([parameter], lr=0.1)
    assert not isinstance(plain, _DistributedAdasumOptimizer)
    wrapped = hvd.DistributedOptimizer(plain, op=op)
    assert isinstance(wrapped, torch.optim.SGD)
    return isinstance(wrapped, _DistributedAdasumOptimizer)


@pytest.mark.np(2)
@pytest.mark.parametrize(("op", "answer"), [(hvd.Average, False), (hvd.Adasum, True)])
def test_the_class_of_an_optimizer_tells_adasum(cluster: Cluster, op: int, answer: bool) -> None:
    assert cluster.run(is_adasum, op) == [answer] * 2
