"""`hvd.join()`: a rank without data is absent from what the others do.

An operation that a rank does not submit completes once that rank has joined, so nothing here
depends on who is faster. Training with joined ranks is in test_join_training.py, gradients of
collectives are in test_autograd_joined.py, deaths and interruptions in test_join_jobs.py.
"""

import itertools

import pytest
import torch
from support.checks import same
from support.reference import Reduction, exchanged, reduced, share

import hvdtorch as hvd

ROWS = (3, 50_000)  # inside the log, and by the transport
OPS = (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def still_in_step() -> None:
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))
    hvd.barrier()


def data(rank: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(rows * 2) * 7 + 3 * rank) % 11 + 1).view(rows, 2).to(dtype)


def groups_of_active_ranks(size: int) -> list[list[int]]:
    some = [[size - 1], [0]]
    if size > 2:
        some += [list(range(1, size)), [0, size - 1]]
    return some


def join_after(active: list[int]) -> None:
    """The last of the active ranks joins last."""
    for rank in active[:-1]:
        if rank == hvd.rank():
            break
        if hvd.rank() in active:
            hvd.barrier()  # until `rank` has joined
    assert hvd.join() == active[-1]
    still_in_step()


def reductions() -> None:
    rank, size = hvd.rank(), hvd.size()
    for active in groups_of_active_ranks(size):
        if rank in active:
            for op, dtype, rows in itertools.product(OPS, DTYPES, ROWS):
                if op == hvd.Average and dtype == torch.bool:
                    continue
                if rows > 3 and dtype not in (torch.float32, torch.bfloat16, torch.int64):
                    continue  # takes long, and shows nothing more
                inputs = [data(r, rows, dtype) for r in active]
                expected = reduced(Reduction(op), inputs, divisor=size)
                same(hvd.allreduce(data(rank, rows, dtype), op=op), expected)
            factors = {"prescale_factor": 0.5, "postscale_factor": 4.0}
            inputs = [data(r, 5) for r in active]
            same(
                hvd.allreduce(data(rank, 5), op=hvd.Average, **factors),
                reduced(Reduction(hvd.Average, 0.5, 4.0), inputs, divisor=size),
            )
        join_after(active)


@pytest.mark.np(2, 3, 4)
def test_reductions_are_among_the_active_ranks(cluster):
    cluster.run(reductions)


def adasum() -> None:
    rank, size = hvd.rank(), hvd.size()
    for active, rows in itertools.product(groups_of_active_ranks(size), (size, 40_000)):
        if rank in active:
            mine = torch.zeros(rows, dtype=torch.float64)
            mine[rank] = rank + 1.0
            expected = torch.zeros(rows, dtype=torch.float64)
            expected[active] = torch.tensor(active, dtype=torch.float64) + 1
            same(hvd.allreduce(mine, op=hvd.Adasum), expected)  # orthogonal: the sum
            same(hvd.allreduce(expected, op=hvd.Adasum), expected)  # all alike: each of them
            pair = hvd.grouped_allreduce([mine, expected], op=hvd.Adasum)
            same(pair[0], expected)
            same(pair[1], expected)
        join_after(active)


@pytest.mark.np(2, 3, 4)
def test_adasum_is_among_the_active_ranks(cluster):
    cluster.run(adasum)


def groups_and_fusion() -> None:
    rank, size = hvd.rank(), hvd.size()
    for active in groups_of_active_ranks(size):
        if rank in active:
            shapes = (3, 50_000, 1)
            want = [reduced(Reduction(hvd.Sum), [data(r, n) for r in active]) for n in shapes]
            for _ in range(2):  # the second time by a name that is known
                mine = [data(rank, n) for n in shapes]
                for got, expected in zip(
                    hvd.grouped_allreduce(mine, op=hvd.Sum, name="group"), want, strict=True
                ):
                    same(got, expected)
                handles = [
                    hvd.allreduce_async_(data(rank, n), op=hvd.Sum, name=f"{n}") for n in shapes
                ]
                for handle, expected in zip(handles, want, strict=True):
                    same(hvd.synchronize(handle), expected)
        join_after(active)


@pytest.mark.np(2, 3, 4)
def test_grouped_and_fused_reductions(cluster):
    cluster.run(groups_and_fusion)


def gathers() -> None:
    rank, size = hvd.rank(), hvd.size()
    for active, rows in itertools.product(groups_of_active_ranks(size), ROWS):
        if rank in active:
            parts = [data(r, rows + 2 * r) for r in active]
            same(hvd.allgather(data(rank, rows + 2 * rank)), torch.cat(parts))
            first, second = hvd.grouped_allgather(
                [data(rank, rows + 2 * rank), data(rank, rank, torch.int16)]
            )
            same(first, torch.cat(parts))
            same(second, torch.cat([data(r, r, torch.int16) for r in active]))
        join_after(active)


@pytest.mark.np(2, 3, 4)
def test_allgather_has_no_rows_of_a_joined_rank(cluster):
    cluster.run(gathers)


def exchanges() -> None:
    rank, size = hvd.rank(), hvd.size()
    for active, unit in itertools.product(groups_of_active_ranks(size), (1, 9_000)):
        if rank in active:
            # Rank s sends unit * (s + to + 1) rows to each rank, and keeps one.
            splits = [
                [unit * (s + to + 1) if s in active else 0 for to in range(size)]
                for s in range(size)
            ]
            inputs = [data(s, sum(splits[s]) + 1) for s in range(size)]
            output, received = hvd.alltoall(inputs[rank], splits[rank])
            same(output, exchanged(inputs, splits, rank))
            same(received, torch.tensor([s[rank] for s in splits], dtype=torch.int32))
            even = hvd.alltoall(data(rank, size * unit))
            equal = [[unit * (s in active)] * size for s in range(size)]
            same(even, exchanged([data(s, size * unit) for s in range(size)], equal, rank))
        join_after(active)


@pytest.mark.np(2, 3, 4)
def test_alltoall_has_no_rows_from_a_joined_rank_and_drops_those_for_it(cluster):
    cluster.run(exchanges)


def scatters() -> None:
    rank, size = hvd.rank(), hvd.size()
    for active, rows in itertools.product(groups_of_active_ranks(size), (1, 7, 30_001)):
        if rank in active:
            for op in (hvd.Sum, hvd.Average):
                inputs = [data(r, rows) for r in active]
                expected = share(reduced(Reduction(op), inputs, divisor=size), rank, size)
                same(hvd.reducescatter(data(rank, rows), op=op), expected)
                one, two = hvd.grouped_reducescatter([data(rank, rows), data(rank, 2)], op=op)
                same(one, expected)
                whole = reduced(Reduction(op), [data(r, 2) for r in active], divisor=size)
                same(two, share(whole, rank, size))
        join_after(active)


@pytest.mark.np(2, 3, 4)
def test_reducescatter_drops_the_share_of_a_joined_rank(cluster):
    cluster.run(scatters)


def broadcasts() -> None:
    rank, size = hvd.rank(), hvd.size()
    for active, rows in itertools.product(groups_of_active_ranks(size), ROWS):
        if rank in active:
            for root in range(size):
                if root in active:
                    same(hvd.broadcast(data(rank, rows), root), data(root, rows))
                    same(hvd.broadcast_(data(rank, rows), root, name="b"), data(root, rows))
                else:
                    kept = data(rank, rows)
                    with pytest.raises(hvd.HorovodInternalError, match=f"rank {root}, has joined"):
                        hvd.broadcast_(kept, root, name="b")
                    same(kept, data(rank, rows))
            hvd.barrier()
        join_after(active)


@pytest.mark.np(2, 3, 4)
def test_broadcast_works_unless_its_root_has_joined(cluster):
    cluster.run(broadcasts)


def objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    for active in groups_of_active_ranks(size):
        if rank in active:
            mine = {"rank": rank, "data": "x" * 3000 * rank}
            root = active[-1]
            assert hvd.broadcast_object(mine, root)["rank"] == root
            assert [o["rank"] for o in hvd.allgather_object(mine)] == active
            joined = (set(range(size)) - set(active)).pop()
            with pytest.raises(hvd.HorovodInternalError, match=f"rank {joined}, has joined"):
                hvd.broadcast_object(mine, joined)
        join_after(active)


@pytest.mark.np(2, 3, 4)
def test_objects_of_the_active_ranks(cluster):
    cluster.run(objects)


def submitted_before() -> None:
    rank, size = hvd.rank(), hvd.size()
    handles = []
    if rank != 0:  # before it joins
        handles = [hvd.allreduce_async(data(rank, n), op=hvd.Sum, name=f"{n}") for n in ROWS]
        handles.append(hvd.allgather_async(data(rank, 2), name="rows"))
        assert hvd.join() == 0
    else:  # after all others have joined
        same(hvd.allreduce(data(0, 1), op=hvd.Sum, name="alone"), data(0, 1))
        handles = [hvd.allreduce_async(data(rank, n), op=hvd.Sum, name=f"{n}") for n in ROWS]
        handles.append(hvd.allgather_async(data(rank, 2), name="rows"))
        assert hvd.join() == 0
    for n, handle in zip(ROWS, handles, strict=False):
        same(
            hvd.synchronize(handle), reduced(Reduction(hvd.Sum), [data(r, n) for r in range(size)])
        )
    same(hvd.synchronize(handles[-1]), torch.cat([data(r, 2) for r in range(size)]))
    still_in_step()


@pytest.mark.np(2, 3, 4)
def test_what_a_rank_submitted_before_it_joins_has_its_part(cluster):
    cluster.run(submitted_before)


def orders() -> None:
    for order in itertools.permutations(range(hvd.size())):
        for rank in order:
            if rank == hvd.rank():
                break
            hvd.barrier()  # without those who have joined; until `rank` has
        last = hvd.join()
        assert type(last) is int and last == order[-1], (last, order)


def test_join_returns_the_last_rank_to_join_on_all_ranks(cluster):
    cluster.run(orders)


def at_once() -> list[int]:
    lasts = [hvd.join() for _ in range(20)]
    lasts.append(hvd.join(device=0))
    lasts.append(hvd.join(-1))
    still_in_step()
    return lasts


def test_joining_at_once_and_again_and_again(cluster):
    lasts = cluster.run(at_once)
    assert lasts == lasts[:1] * cluster.size
    assert set(lasts[0]) <= set(range(cluster.size))


def uneven_unnamed() -> None:
    """Unnamed operations are numbered anew, so ranks that made more calls match the others."""
    rank, size = hvd.rank(), hvd.size()
    half = hvd.add_process_set(range(0, size, 2)) if size > 2 else None
    for turn in range(3):
        calls = (rank + turn) % size
        for i in range(calls):
            hvd.allreduce(torch.tensor([float(rank + i)]))
            hvd.grouped_allgather([torch.ones(1), torch.ones(2)])
            x = torch.ones(3, requires_grad=True)
            hvd.allreduce(x, op=hvd.Sum).sum().backward()  # unnamed too
            if half is not None and half.included():
                hvd.allreduce(torch.ones(2), process_set=half)
        hvd.join()
        same(hvd.allreduce(torch.tensor([rank]), op=hvd.Sum), torch.tensor([sum(range(size))]))
        x = torch.ones(3, requires_grad=True)
        (hvd.allreduce(x, op=hvd.Sum) * (rank + 1)).sum().backward()
        same(x.grad, torch.full((3,), float(sum(range(1, size + 1)))))
        if half is not None and half.included():
            total = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=half)
            same(total, torch.tensor([sum(half.ranks)]))
    if half is not None:
        assert hvd.remove_process_set(half)
    still_in_step()


def test_unnamed_operations_match_after_uneven_numbers_of_calls(cluster):
    cluster.run(uneven_unnamed)


def in_process_sets() -> None:
    rank = hvd.rank()
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2, 3], [0, 3], [3])]
    for joined in ([3], [1, 3], [0, 1, 2]):
        active = [r for r in range(4) if r not in joined]
        for some in sets if rank in active else []:
            here = [r for r in some.ranks if r in active]
            if rank not in here:
                continue
            for rows, op in itertools.product(ROWS, OPS):
                inputs = [data(r, rows) for r in here]
                expected = reduced(Reduction(op), inputs, divisor=some.size())
                same(hvd.allreduce(data(rank, rows), op=op, process_set=some), expected)
            same(
                hvd.allgather(data(rank, rank), process_set=some),
                torch.cat([data(r, r) for r in here]),
            )
            for root in some.ranks:
                if root in active:
                    same(hvd.broadcast(data(rank, 1), root, process_set=some), data(root, 1))
                else:
                    with pytest.raises(hvd.HorovodInternalError, match=f"rank {root}, has joined"):
                        hvd.broadcast(data(rank, 1), root, process_set=some)
            hvd.barrier(process_set=some)
        join_after(active)
    for some in sets:
        assert hvd.remove_process_set(some)


@pytest.mark.np(4)
def test_a_joined_rank_is_absent_in_all_its_process_sets(cluster):
    cluster.run(in_process_sets)


def changing_sets() -> str:
    rank, size = hvd.rank(), hvd.size()
    known = hvd.add_process_set([size - 1])
    texts = []
    if rank != 0:
        for call in (
            lambda: hvd.add_process_set([0]),
            lambda: hvd.remove_process_set(known),
        ):
            with pytest.raises(hvd.HorovodInternalError, match="rank 0 has joined") as caught:
                call()
            texts.append(str(caught.value))
    join_after(list(range(1, size)))
    if known.included():
        same(hvd.allreduce(data(rank, 2), process_set=known), data(rank, 2))
    assert hvd.remove_process_set(known) and hvd.remove_process_set(hvd.add_process_set([0]))
    still_in_step()
    return "\n".join(texts)


@pytest.mark.np(2, 3, 4)
def test_process_sets_cannot_change_while_a_rank_has_joined(cluster):
    texts = cluster.run(changing_sets)[1:]
    assert texts == texts[:1] * len(texts)
