"""Collectives of process sets: for members only, with values among the members."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from support.checks import same
from support.reference import Reduction, exchanged, reduced, share

import hvdtorch as hvd

ROWS = (3, 50_000)  # inside the log, and by the transport


def still_in_step() -> None:
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))
    hvd.barrier()


def data(rank: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(rows * 2) * 7 + 3 * rank) % 11 + 1).view(rows, 2).to(dtype)


@contextmanager
def process_sets(*sets: Sequence[int]) -> Iterator[list[hvd.ProcessSet]]:
    registered = [hvd.add_process_set(ranks) for ranks in sets]
    yield registered
    for each in registered:
        assert hvd.remove_process_set(each)


CALLS = {
    "allreduce": lambda s: hvd.allreduce(torch.ones(1), process_set=s),
    "allreduce_": lambda s: hvd.allreduce_(torch.ones(1), process_set=s),
    "allreduce_async": lambda s: hvd.allreduce_async(torch.ones(1), process_set=s),
    "allreduce_async_": lambda s: hvd.allreduce_async_(torch.ones(1), process_set=s),
    "grouped_allreduce": lambda s: hvd.grouped_allreduce([torch.ones(1)], process_set=s),
    "grouped_allreduce_": lambda s: hvd.grouped_allreduce_([torch.ones(1)], process_set=s),
    "grouped_allreduce_async": lambda s: hvd.grouped_allreduce_async(
        [torch.ones(1)], process_set=s
    ),
    "grouped_allreduce_async_": lambda s: hvd.grouped_allreduce_async_(
        [torch.ones(1)], process_set=s
    ),
    "sparse_allreduce_async": lambda s: hvd.sparse_allreduce_async(
        torch.eye(2).to_sparse(), "table", hvd.Sum, process_set=s
    ),
    "allgather": lambda s: hvd.allgather(torch.ones(1), process_set=s),
    "allgather_async": lambda s: hvd.allgather_async(torch.ones(1), process_set=s),
    "grouped_allgather": lambda s: hvd.grouped_allgather([torch.ones(1)], process_set=s),
    "grouped_allgather_async": lambda s: hvd.grouped_allgather_async(
        [torch.ones(1)], process_set=s
    ),
    "broadcast": lambda s: hvd.broadcast(torch.ones(1), 0, process_set=s),
    "broadcast_": lambda s: hvd.broadcast_(torch.ones(1), 0, process_set=s),
    "broadcast_async": lambda s: hvd.broadcast_async(torch.ones(1), 0, process_set=s),
    "broadcast_async_": lambda s: hvd.broadcast_async_(torch.ones(1), 0, process_set=s),
    "alltoall": lambda s: hvd.alltoall(torch.ones(1), process_set=s),
    "alltoall_async": lambda s: hvd.alltoall_async(torch.ones(1), process_set=s),
    "reducescatter": lambda s: hvd.reducescatter(torch.ones(1), process_set=s),
    "reducescatter_async": lambda s: hvd.reducescatter_async(torch.ones(1), process_set=s),
    "grouped_reducescatter": lambda s: hvd.grouped_reducescatter([torch.ones(1)], process_set=s),
    "grouped_reducescatter_async": lambda s: hvd.grouped_reducescatter_async(
        [torch.ones(1)], process_set=s
    ),
    "barrier": lambda s: hvd.barrier(process_set=s),
    "broadcast_object": lambda s: hvd.broadcast_object(1, 0, process_set=s),
}


def refused() -> None:
    with process_sets([0]) as (some,):
        if hvd.rank() != 0:
            for name, call in CALLS.items():
                with pytest.raises(ValueError, match="not a member of ProcessSet"):
                    call(some)
                    raise AssertionError(f"no error from {name}")
        else:
            for call in CALLS.values():
                result = call(some)
                if isinstance(result, hvd.Handle):
                    hvd.synchronize(result)
                elif callable(result):
                    result()
    for name, call in CALLS.items():
        for wrong, error in ((some, TypeError), (hvd.ProcessSet([0]), TypeError)):
            with pytest.raises(error, match="not registered"):
                call(wrong)
        for wrong in (None, 0, 1, [0]):
            with pytest.raises((TypeError, AttributeError)):
                call(wrong)
                raise AssertionError(f"no error from {name}({wrong})")
    still_in_step()


@pytest.mark.np(2, 3)
def test_who_and_what_is_refused_at_the_call(cluster):
    cluster.run(refused)


def all_collectives() -> None:
    rank, size = hvd.rank(), hvd.size()
    with process_sets(range(1, size), [size - 1, 0], [size - 2]) as sets:
        for some in sets:
            if not some.included():
                continue
            ranks, me, count = some.ranks, some.rank(), some.size()
            for rows in ROWS:
                for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
                    expected = reduced(Reduction(op), [data(r, rows) for r in ranks])
                    same(hvd.allreduce(data(rank, rows), op=op, process_set=some), expected)
                mine = data(rank, rows)
                total = reduced(Reduction(hvd.Sum), [data(r, rows) for r in ranks])
                assert hvd.allreduce_(mine, op=hvd.Sum, process_set=some) is mine
                same(mine, total)
                group = hvd.grouped_allreduce(
                    [data(rank, rows), data(rank, 2)], op=hvd.Sum, process_set=some
                )
                same(group[0], total)
                same(group[1], reduced(Reduction(hvd.Sum), [data(r, 2) for r in ranks]))
                same(
                    hvd.allgather(data(rank, rows + rank), process_set=some),
                    torch.cat([data(r, rows + r) for r in ranks]),
                )
                for root in ranks:  # a global rank
                    same(hvd.broadcast(data(rank, rows), root, process_set=some), data(root, rows))
                splits = [[(r + to) * rows for to in range(count)] for r in ranks]
                inputs = [data(r, sum(s)) for r, s in zip(ranks, splits, strict=True)]
                output, received = hvd.alltoall(inputs[me], splits[me], process_set=some)
                same(output, exchanged(inputs, splits, me))
                same(received, torch.tensor([s[me] for s in splits], dtype=torch.int32))
                same(
                    hvd.reducescatter(data(rank, rows), op=hvd.Sum, process_set=some),
                    share(total, me, count),
                )
                orthogonal = torch.zeros(rows * size)
                orthogonal[rank] = 1
                same(
                    hvd.allreduce(orthogonal, op=hvd.Adasum, process_set=some),
                    torch.zeros(rows * size).index_fill(0, torch.tensor(ranks), 1),
                )
            hvd.barrier(process_set=some)
            assert hvd.broadcast_object(rank, ranks[-1], process_set=some) == ranks[-1]
            x = torch.ones(2, requires_grad=True)
            (hvd.allreduce(x, process_set=some) * (rank + 1)).sum().backward()
            same(x.grad, torch.full((2,), (sum(ranks) + count) / count))
            x = torch.ones(2, requires_grad=True)
            gathered = hvd.allgather(x, process_set=some)
            (gathered * (rank + 1)).sum().backward()
            same(x.grad, torch.full((2,), (sum(ranks) + count) / count))
            outside = set(range(size)) - set(ranks)
            for root in (*outside, -1, size):
                with pytest.raises(ValueError, match=f"root_rank {root} is not a member"):
                    hvd.broadcast(torch.ones(1), root, process_set=some)
            with pytest.raises(ValueError, match="splits"):
                hvd.alltoall(torch.ones(size), [1] * size, process_set=some)
    still_in_step()


@pytest.mark.np(3, 4)
def test_every_collective_is_among_the_members(cluster):
    cluster.run(all_collectives)


def disagreement() -> str:
    rank = hvd.rank()
    with process_sets([0, 2]) as (some,):
        text = ""
        if some.included():
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.allreduce(torch.ones(1 + rank), name="x", process_set=some)
            text = str(caught.value)
            same(hvd.allreduce(torch.ones(1), name="x", process_set=some), torch.ones(1))
    still_in_step()
    return text


@pytest.mark.np(3, 4)
def test_a_disagreement_names_global_ranks(cluster):
    texts = cluster.run(disagreement)
    assert texts[0] == texts[2] and texts[1] == ""
    assert "rank 0: [1]" in texts[0] and "rank 2: [3]" in texts[0], texts[0]


def one_name_in_several_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    with process_sets([0, 1], range(1, size)) as sets:
        sets = [hvd.global_process_set, *sets]
        mine = [s for s in sets if s.included()]
        if rank % 2:
            mine.reverse()
        handles = []
        for some in mine:
            for rows in ROWS:
                x = data(rank, rows)
                handles.append(hvd.allreduce_async(x, name=f"{rows}", op=hvd.Sum, process_set=some))
        for some, rows in itertools.product(mine, ROWS):
            expected = reduced(Reduction(hvd.Sum), [data(r, rows) for r in some.ranks])
            same(hvd.synchronize(handles.pop(0)), expected)
    still_in_step()


@pytest.mark.np(3, 4)
def test_a_name_can_be_in_flight_in_several_sets_at_once(cluster):
    cluster.run(one_name_in_several_sets)


def unnamed_numbering() -> None:
    """Ranks make different numbers of unnamed calls in sets that others are not in."""
    rank, size = hvd.rank(), hvd.size()
    with process_sets([0, 1], [size - 1]) as sets:
        for some, calls in zip(sets, (3, 2), strict=True):
            for _ in range(calls if some.included() else 0):
                total = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=some)
                same(total, torch.tensor([sum(some.ranks)]))
                x = torch.ones(1, requires_grad=True)
                hvd.allreduce(x, process_set=some).sum().backward()
        same(hvd.allreduce(torch.tensor([rank]), op=hvd.Sum), torch.tensor([sum(range(size))]))
    still_in_step()


@pytest.mark.np(3, 4)
def test_unnamed_operations_are_numbered_in_each_set(cluster):
    cluster.run(unnamed_numbering)
