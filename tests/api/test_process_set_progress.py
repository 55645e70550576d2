"""Process sets beside each other: none waits for another, and one can be removed while in use."""

import itertools
import threading

import pytest
import torch
from support.checks import same
from support.scripts import run_script

import hvdtorch as hvd

NUMELS = (3, 100_000)  # inside the log, and by the transport


def still_in_step() -> None:
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))
    hvd.barrier()


def late_member() -> None:
    """Rank 0 holds back its part in two sets until everything in the others has been done."""
    rank, size = hvd.rank(), hvd.size()
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], range(1, size), [1], [size - 1])]
    late = [some for some in (hvd.global_process_set, sets[0]) if some.included()]

    def submit() -> list[hvd.Handle]:
        return [
            hvd.allreduce_async(torch.full((n,), rank), name=f"{n}", op=hvd.Sum, process_set=some)
            for some, n in itertools.product(late, NUMELS)
        ]

    handles = submit() if rank else []
    for some, numel, turn in itertools.product(sets[1:], NUMELS, range(5)):
        if some.included():
            x = torch.full((numel,), rank + turn)
            total = hvd.allreduce(x, op=hvd.Sum, process_set=some)
            same(total, torch.full((numel,), sum(some.ranks) + turn * some.size()))
    assert not any(handle.done() for handle in handles)
    hvd.barrier()
    handles = handles or submit()
    for (some, numel), handle in zip(itertools.product(late, NUMELS), handles, strict=True):
        same(hvd.synchronize(handle), torch.full((numel,), sum(some.ranks)))
    for some in sets:
        assert hvd.remove_process_set(some)
    still_in_step()


@pytest.mark.np(3, 4)
def test_a_set_whose_member_is_late_delays_no_other(cluster):
    cluster.run(late_member)


def test_a_set_whose_member_stops_during_a_transfer_delays_no_other():
    result = run_script(
        4,
        """
        import os, signal
        import torch
        import hvdtorch as hvd

        hvd.init()
        rank = hvd.rank()
        stopped, others, overlapping = (
            hvd.add_process_set(ranks) for ranks in ([0, 3], [1, 2], [0, 1, 2])
        )
        pid = hvd.broadcast_object(os.getpid(), 3)
        big = torch.ones(10_000_000)  # more than the kernel takes in for a process that is stopped
        if rank == 3:
            handle = hvd.allreduce_async_(big, op=hvd.Sum, process_set=stopped)
        hvd.barrier()
        if rank == 0:
            os.kill(pid, signal.SIGSTOP)
            handle = hvd.allreduce_async_(big, op=hvd.Sum, process_set=stopped)
        if rank < 3:
            for turn in range(20):
                for numel in (3, 100_000):
                    x = torch.full((numel,), rank + turn)
                    total = hvd.allreduce(x, op=hvd.Sum, process_set=overlapping)
                    assert total.eq(3 + 3 * turn).all()
                    if rank:
                        total = hvd.allreduce(x, op=hvd.Sum, process_set=others)
                        assert total.eq(3 + 2 * turn).all()
            hvd.barrier(process_set=overlapping)
        if rank == 0:
            assert not handle.done()
            os.kill(pid, signal.SIGCONT)
        if rank in (0, 3):
            assert hvd.synchronize(handle).eq(2).all()
        hvd.barrier()
        """,
    )
    assert result.returncodes == [0] * 4, result.stdout


def removed_in_flight() -> None:
    rank, size = hvd.rank(), hvd.size()
    some = hvd.add_process_set(range(1, size))
    agreed, alone = [], []
    if some.included():
        for turn, numel in itertools.product(range(10), (3, 100_000, 1_000_000)):
            x = torch.full((numel,), rank + turn)
            agreed.append((turn, hvd.allreduce_async(x, op=hvd.Sum, process_set=some)))
        if rank == size - 1:
            alone = [
                hvd.allreduce_async(torch.ones(n), name=f"alone.{n}", process_set=some)
                for n in NUMELS
            ]
            alone.append(
                hvd.grouped_allreduce_async([torch.ones(2)] * 2, name="group", process_set=some)
            )
        elif rank == 1:
            alone = [hvd.grouped_allreduce_async([torch.ones(2)], name="group", process_set=some)]
    assert hvd.remove_process_set(some)
    for turn, handle in agreed:
        total = hvd.synchronize(handle)
        assert total.eq(sum(range(1, size)) + turn * (size - 1)).all()
    for handle in alone:
        with pytest.raises(hvd.HorovodInternalError, match=r"process set \d+ was removed"):
            hvd.synchronize(handle)
    with pytest.raises(TypeError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=some)
    still_in_step()


@pytest.mark.np(3, 4)
def test_a_set_removed_in_flight_completes_what_its_ranks_agreed_on(cluster):
    cluster.run(removed_in_flight)


def removed_under_a_thread() -> int:
    """Other threads submit all the time while a set is removed: every result is right or an error
    that says why."""
    rank, size = hvd.rank(), hvd.size()
    done = 0
    for turn in range(5):
        some, other = hvd.add_process_set(range(1, size)), hvd.add_process_set([0, size - 1])
        number = some.process_set_id
        results: list[int] = []
        errors: list[Exception] = []

        def work(label: str, numel: int, sink: list[int], bad: list[Exception]) -> None:
            try:
                for step in itertools.count():
                    name = f"{label}.{step}"
                    x = torch.full((numel,), rank + step)
                    total = hvd.allreduce(x, name=name, op=hvd.Sum, process_set=some)  # noqa: B023
                    assert total.eq(sum(range(1, size)) + step * (size - 1)).all()
                    sink.append(step)
            except Exception as failure:
                bad.append(failure)

        threads = [
            threading.Thread(target=work, args=(f"{n}", n, results, errors))
            for n in (NUMELS if some.included() else ())
        ]
        for thread in threads:
            thread.start()
        for _ in range(10 + turn):
            if other.included():
                x = torch.full((1000,), rank)
                assert hvd.allreduce(x, op=hvd.Sum, process_set=other).eq(size - 1).all()
            hvd.barrier()
        assert hvd.remove_process_set(some)
        for thread in threads:
            thread.join()
        for error in errors:
            assert isinstance(error, (hvd.HorovodInternalError, ValueError, TypeError)), error
            assert not isinstance(error, hvd.HorovodInternalError) or (
                f"process set {number} was removed" in str(error)
            ), error
        assert hvd.remove_process_set(other)
        done += len(results)
    still_in_step()
    return done


@pytest.mark.np(3, 4)
def test_a_set_removed_while_threads_submit(cluster):
    done = cluster.run(removed_under_a_thread)
    assert done[0] == 0 and min(done[1:]) > 0


def many_sets_at_once() -> None:
    """Every pair and triple of ranks is a set; a thread for each works in it."""
    rank, size = hvd.rank(), hvd.size()
    sets = [
        hvd.add_process_set(ranks)
        for count in (2, 3)
        for ranks in itertools.combinations(range(size), count)
        if count < size
    ]
    errors: list[BaseException] = []

    def work(some: hvd.ProcessSet) -> None:
        try:
            for turn, numel in itertools.product(range(5), NUMELS):
                x = torch.full((numel,), rank + turn)
                total = hvd.allreduce(x, op=hvd.Sum, process_set=some)
                same(total, torch.full((numel,), sum(some.ranks) + turn * some.size()))
                root = some.ranks[turn % some.size()]
                same(hvd.broadcast(x, root, process_set=some), torch.full((numel,), root + turn))
                same(
                    hvd.allgather(x[: rank + 1], process_set=some),
                    torch.cat([torch.full((min(r + 1, numel),), r + turn) for r in some.ranks]),
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(some,)) for some in sets if some.included()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for some in reversed(sets):
        assert hvd.remove_process_set(some)
    still_in_step()


@pytest.mark.np(3, 4)
def test_many_sets_work_at_once(cluster):
    cluster.run(many_sets_at_once)
