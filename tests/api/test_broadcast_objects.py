"""broadcast_object and allgather_object."""

import pytest
import torch
from support.checks import same

import hvdtorch as hvd


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this object stays at home")


class Unbuildable:
    """Its copy cannot be built on the ranks in `where`."""

    def __init__(self, where: list[int]) -> None:
        self.where = where

    def __reduce__(self):
        return rebuild, (self.where,)


def rebuild(where: list[int]) -> str:
    if hvd.rank() in where:
        raise LookupError("no material")
    return "built"


def objects_from(root: int) -> None:
    rank = hvd.rank()
    nothing = object()  # of another type than the root's; is not even pickled
    for obj in (
        None,
        0,
        "text",
        b"",
        {"a": [1, (2, 3)], "b": {4}},
        list(range(100_000)),
        {"tensor": torch.arange(5.0), "grad": torch.nn.Parameter(torch.ones(2))},
    ):
        received = hvd.broadcast_object(obj if rank == root else nothing, root)
        if rank == root:
            assert received is obj
        elif isinstance(obj, dict) and "tensor" in obj:
            same(received["tensor"], torch.arange(5.0))
            same(received["grad"], torch.ones(2))
            assert received["grad"].requires_grad
        else:
            assert received == obj
        named = hvd.broadcast_object(rank, root, name="number")
        assert named == root


def test_broadcast_object_from_every_root(cluster):
    for root in range(cluster.size):
        cluster.run(objects_from, root)


def gather_objects() -> None:
    rank, size = hvd.rank(), hvd.size()

    def of(r: int) -> object:
        return [None, "x" * r, {"rank": r}, list(range(r * 50_000))][r]

    mine = of(rank)
    for result in (hvd.allgather_object(mine), hvd.allgather_object(mine, name="things")):
        assert result == [of(r) for r in range(size)]
    (copy,) = [hvd.allgather_object([rank])[rank]]
    assert copy == [rank]


def test_allgather_object_of_different_types_and_lengths(cluster):
    cluster.run(gather_objects)


def failing_objects() -> list[str]:
    rank, size = hvd.rank(), hvd.size()
    texts = []

    def refused(call, *arguments) -> None:
        with pytest.raises(RuntimeError) as caught:
            call(*arguments)
        texts.append(str(caught.value))

    refused(hvd.broadcast_object, Unpicklable() if rank == 0 else None)
    refused(hvd.broadcast_object, Unbuildable([size - 1]))
    refused(hvd.allgather_object, Unpicklable() if rank == size - 1 else 1)
    refused(hvd.allgather_object, Unbuildable([size - 1]))
    assert hvd.broadcast_object(rank) == 0
    assert hvd.allgather_object(rank) == list(range(size))
    return texts


@pytest.mark.np(2, 3)
def test_a_failure_on_one_rank_is_an_error_on_all(cluster):
    last = cluster.size - 1
    results = cluster.run(failing_objects)
    assert all(texts == results[0] for texts in results)
    home, built, gathered, rebuilt = results[0]
    assert "rank 0: TypeError: this object stays at home" in home
    assert f"rank {last}: LookupError: no material" in built
    assert f"rank {last}: TypeError: this object stays at home" in gathered
    assert f"rank {last}: LookupError: no material" in rebuilt
