"""Process sets: how they are made, registered and removed, and what they say of themselves.

What collectives do with them is in test_process_set_collectives.py.
"""

import copy
import importlib.util
import os
import pickle
import time
from typing import Any

import pytest
import torch
from support.checks import same
from support.scripts import run_script

import hvdtorch as hvd


def still_in_step() -> None:
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))


def life_of_a_set() -> list[int | None]:
    rank, size = hvd.rank(), hvd.size()
    some = hvd.ProcessSet([size - 1, 0])
    assert some.ranks == [0, size - 1] and some.process_set_id is None and some.mpi_comm is None
    assert some.size() is None and some.rank() is None
    assert some.included() is (rank in (0, size - 1))
    assert str(some) == f"ProcessSet(process_set_id=None, ranks=[0, {size - 1}], mpi_comm=None)"
    assert hvd.add_process_set(some) is some
    first = some.process_set_id
    assert type(first) is int and first > 0
    assert str(some) == f"ProcessSet(process_set_id={first}, ranks=[0, {size - 1}], mpi_comm=None)"
    assert some.size() == 2
    for each in (some, hvd.global_process_set):
        assert copy.copy(each) is copy.deepcopy(each) is pickle.loads(pickle.dumps(each)) is each
    assert hvd.broadcast_object(some, size - 1) is some
    if rank in (0, size - 1):
        assert some.included() and some.rank() == (0 if rank == 0 else 1)
    else:
        assert not some.included()
        with pytest.raises(ValueError, match=f"rank {rank} is not a member of ProcessSet"):
            some.rank()

    last = hvd.add_process_set(iter([size - 1]))  # any iterable
    assert isinstance(last, hvd.ProcessSet) and last.process_set_id == first + 1
    assert last.ranks == [size - 1] and last.size() == 1

    assert hvd.remove_process_set(some) is True
    assert some.process_set_id is None and some.ranks == [0, size - 1]
    assert some.size() is None and some.rank() is None
    assert some.included() is (rank in (0, size - 1))
    clone = pickle.loads(pickle.dumps(some))
    assert clone is not some and clone != some and str(clone) == str(some)
    for gone in (some, hvd.ProcessSet([0]), hvd.global_process_set):
        assert hvd.remove_process_set(gone) is False
    assert hvd.add_process_set(some) is some
    assert some.process_set_id == first + 2  # ids are not used again
    assert hvd.remove_process_set(last) and hvd.remove_process_set(some)
    still_in_step()
    return [first, size]


@pytest.mark.np(3, 4)
def test_a_set_is_added_and_removed(cluster):
    results = cluster.run(life_of_a_set)
    assert results == results[:1] * cluster.size


def what_cannot_be_a_set() -> None:
    for wrong in ([0.0], ["0"], "01", [torch.tensor(0)], [True], [None], [0, 1.0]):
        with pytest.raises(ValueError, match="Python ints"):
            hvd.ProcessSet(wrong)
        with pytest.raises(ValueError, match="Python ints"):
            hvd.add_process_set(wrong)
    for make in (hvd.ProcessSet, hvd.add_process_set):
        with pytest.raises(ValueError, match="at least one rank"):
            make([])
        with pytest.raises(ValueError, match=r"each rank once, not \[0, 0\]"):
            make([0, 0])
        with pytest.raises(TypeError):
            make(3)
    size = hvd.size()
    for wrong in ([-1], [size], [0, 10**6]):
        with pytest.raises(ValueError, match=f"the job has the ranks 0-{size - 1}"):
            hvd.add_process_set(wrong)
    for everyone in (range(size), list(reversed(range(size)))):
        with pytest.raises(ValueError, match="global_process_set"):
            hvd.add_process_set(everyone)
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(hvd.global_process_set)
    if size > 1:
        one = hvd.add_process_set([0])
        for again in (one, [0], hvd.ProcessSet([0])):
            with pytest.raises(ValueError, match="registered already"):
                hvd.add_process_set(again)
        assert hvd.remove_process_set(one)
    still_in_step()


def test_what_cannot_be_a_set(cluster):
    cluster.run(what_cannot_be_a_set)


def different_order() -> str:
    pairs = [[0, 1], [2, 3]] if hvd.rank() == 0 else [[2, 3], [0, 1]]
    texts = []
    for pair in pairs:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.add_process_set(pair)
        texts.append(str(caught.value))
    for ranks in ([0, 1], [2, 3]):  # nothing was registered: both can be now
        assert hvd.remove_process_set(hvd.add_process_set(ranks))
    still_in_step()
    return "\n".join(texts)


@pytest.mark.np(4)
def test_sets_added_in_different_orders_are_an_error_that_names_both(cluster):
    texts = cluster.run(different_order)
    assert len(set(texts)) == 1, texts
    first, second = texts[0].splitlines()
    assert "rank 0: ranks [0, 1]" in first and "ranks 1-3: ranks [2, 3]" in first
    assert "rank 0: ranks [2, 3]" in second and "ranks 1-3: ranks [0, 1]" in second
    assert "in the same order" in first and "test_process_sets.py" in first


def one_adds_another_removes() -> str:
    known = hvd.add_process_set([0])
    with pytest.raises(hvd.HorovodInternalError) as caught:
        if hvd.rank() == 0:
            hvd.remove_process_set(known)
        else:
            hvd.add_process_set([1])
    assert known.process_set_id is not None  # still there
    if known.included():
        same(hvd.allreduce(torch.ones(2), process_set=known), torch.ones(2))
    assert hvd.remove_process_set(known)
    still_in_step()
    return str(caught.value)


@pytest.mark.np(2, 3)
def test_adding_on_one_rank_and_removing_on_another_is_an_error(cluster):
    texts = cluster.run(one_adds_another_removes)
    assert len(set(texts)) == 1, texts
    assert "remove_process_set" in texts[0] and "add_process_set" in texts[0]


def removing_different_sets() -> str:
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.remove_process_set(sets[hvd.rank() % 2])
    for each in sets:
        assert hvd.remove_process_set(each)
    still_in_step()
    return str(caught.value)


@pytest.mark.np(2, 3)
def test_removing_different_sets_is_an_error(cluster):
    texts = cluster.run(removing_different_sets)
    assert len(set(texts)) == 1, texts
    assert "disagree on process set" in texts[0]


class Part:
    """What hvdtorch uses of an mpi4py communicator: the job's ranks that gave the same color."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks

    def Get_size(self) -> int:
        return len(self.ranks)

    def allgather(self, value: Any) -> list[Any]:
        assert value == hvd.rank()
        return self.ranks


def from_communicators() -> list[int | None]:
    rank, size = hvd.rank(), hvd.size()
    parts = [list(range(0, size, 2)), list(range(1, size, 2))]
    mine = hvd.ProcessSet(Part(parts[rank % 2]))
    assert mine.ranks is None and mine.included() is None
    assert mine.size() is None and mine.rank() is None
    for _ in range(2):
        assert hvd.add_process_set(mine) is mine
        assert mine.ranks == parts[rank % 2] and mine.included()
        assert (mine.rank(), mine.size()) == (rank // 2, len(mine.ranks))
        same(
            hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=mine),
            torch.tensor([sum(mine.ranks)]),
        )
        # All parts of the split are registered, not only this rank's.
        with pytest.raises(ValueError, match="registered already"):
            hvd.add_process_set(parts[1 - rank % 2])
        number = mine.process_set_id
        hvd.barrier()
        hvd.shutdown()
        assert mine.process_set_id is None
        hvd.init()
    with pytest.raises(ValueError, match="global_process_set"):
        hvd.add_process_set(hvd.ProcessSet(Part(list(range(size)))))
    still_in_step()
    return [number]


@pytest.mark.np(2, 3, 4)
def test_sets_from_communicators(cluster):
    results = cluster.run(from_communicators)
    assert [r[0] for r in results] == [1 + rank % 2 for rank in range(cluster.size)]


def communicator_against_ranks() -> str:
    with pytest.raises(hvd.HorovodInternalError) as caught:
        if hvd.rank() == 0:
            hvd.add_process_set(hvd.ProcessSet(Part([0])))
        else:
            hvd.add_process_set([1])
    still_in_step()
    return str(caught.value)


@pytest.mark.np(2, 3)
def test_a_communicator_on_one_rank_and_ranks_on_another_are_an_error(cluster):
    texts = cluster.run(communicator_against_ranks)
    assert len(set(texts)) == 1 and "add_process_set" in texts[0], texts


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed here"
)
def test_sets_from_mpi4py():
    result = run_script(
        1,
        """
        from mpi4py import MPI
        import hvdtorch as hvd

        hvd.init(comm=MPI.COMM_WORLD)
        assert hvd.global_process_set.mpi_comm is MPI.COMM_WORLD
        assert hvd.ProcessSet(MPI.COMM_WORLD).included() is None
        """,
    )
    assert result.returncode == 0, result.stdout


def count() -> dict[str, int]:
    return {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}


def cycles() -> None:
    rank, size = hvd.rank(), hvd.size()
    ranks = [0, size - 1]
    hvd.allreduce(torch.ones(100_000))
    before = count()
    for turn in range(12):
        some = hvd.add_process_set(ranks)
        if some.included():
            for numel in (3, 100_000):
                x = torch.full((numel,), rank + turn)
                total = hvd.allreduce(x, op=hvd.Sum, process_set=some)
                assert total.eq(sum(ranks) + 2 * turn).all()
        assert hvd.remove_process_set(some)
        deadline = time.monotonic() + 5
        while count() != before and time.monotonic() < deadline:
            time.sleep(0.01)  # the set's thread takes a moment to go
        assert count() == before


@pytest.mark.np(3, 4)
def test_adding_and_removing_leaves_no_thread_or_descriptor(cluster):
    cluster.run(cycles)


def after_shutdown() -> None:
    some = hvd.add_process_set([0])
    hvd.shutdown()
    assert some.process_set_id is None and hvd.global_process_set.ranks is None
    assert some.size() is None and some.rank() is None
    for call in (
        some.included,
        hvd.global_process_set.included,
        lambda: hvd.add_process_set([0]),
        lambda: hvd.remove_process_set(some),
    ):
        with pytest.raises(ValueError, match="call hvd"):
            call()
    with pytest.raises(TypeError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=some)
    hvd.init(process_sets=[some])
    assert some.process_set_id == 1 and some.ranks == [0]
    if some.included():
        same(hvd.allreduce(torch.ones(1), process_set=some), torch.ones(1))
    assert hvd.remove_process_set(some)
    still_in_step()


@pytest.mark.np(2, 3)
def test_sets_end_with_the_job_and_can_be_given_to_the_next(cluster):
    cluster.run(after_shutdown)
