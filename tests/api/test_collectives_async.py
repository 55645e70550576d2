"""Handles, and operations submitted in any order, from any thread, many at a time."""

import gc
import random
import signal
import threading

import pytest
import torch
from support.checks import same

import hvdtorch as hvd


def opposite_orders() -> None:
    rank, size = hvd.rank(), hvd.size()
    order = list(range(60))
    if rank % 2:
        order.reverse()
    handles = {}
    for i in order:
        tensor = torch.full((i * 37 + 1,), float(rank + i))
        handles[i] = hvd.allreduce_async(tensor, name=f"tensor.{i}", op=hvd.Sum)
    for i in range(60):
        wanted = torch.full((i * 37 + 1,), float(size * (size - 1) // 2 + size * i))
        same(hvd.synchronize(handles[i]), wanted)


def test_ranks_submit_in_opposite_orders(cluster):
    cluster.run(opposite_orders)


def shuffled_kinds(seed: int) -> None:
    """All kinds, dtypes and forms in flight at once, in an order of each rank's own."""
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) // 2
    dtypes = (torch.float32, torch.int64, torch.bfloat16, torch.uint8)
    jobs = [(kind, i) for kind in ("reduce", "gather", "cast", "group") for i in range(20)]
    random.Random(seed * 100 + rank).shuffle(jobs)
    handles = {}
    for kind, i in jobs:
        tensor = torch.full((i + 1, 3), rank, dtype=dtypes[i % 4])
        if kind == "reduce":
            handle = hvd.allreduce_async_(tensor, name=str(i), op=hvd.Sum)
        elif kind == "gather":
            handle = hvd.allgather_async(tensor[: rank + i % 2], name=str(i))
        elif kind == "cast":
            handle = hvd.broadcast_async_(tensor, i % size, name=str(i))
        else:
            handle = hvd.grouped_allreduce_async([tensor, tensor.double()], name=str(i), op=hvd.Max)
        handles[kind, i] = handle
    for (kind, i), handle in handles.items():
        result = hvd.synchronize(handle)
        like = torch.empty((i + 1, 3), dtype=dtypes[i % 4])
        if kind == "reduce":
            same(result, torch.full_like(like, total))
        elif kind == "gather":
            parts = [torch.full_like(like, r)[: r + i % 2] for r in range(size)]
            same(result, torch.cat(parts))
        elif kind == "cast":
            same(result, torch.full_like(like, i % size))
        else:
            same(result[0], torch.full_like(like, size - 1))
            same(result[1], torch.full_like(like, size - 1).double())


@pytest.mark.parametrize("seed", range(3))
def test_everything_in_flight_in_random_orders(cluster, seed):
    cluster.run(shuffled_kinds, seed)


def unnamed_out_of_step() -> None:
    """Unnamed operations count per kind: extra named or failing calls elsewhere do not matter."""
    rank, size = hvd.rank(), hvd.size()
    one = torch.ones(1)
    if rank == 0:
        for _ in range(3):
            with pytest.raises(TypeError):
                hvd.allgather([1.0])
    handles = [hvd.allreduce_async(one, op=hvd.Sum), hvd.allgather_async(one)]
    if rank % 2:
        handles = [hvd.broadcast_async(one * rank, 0), *handles]
    else:
        handles = [*handles, hvd.broadcast_async(one * rank, 0)]
    results = [hvd.synchronize(handle) for handle in handles]
    if rank % 2:
        results = results[1:] + results[:1]
    same(results[0], one * size)
    same(results[1], torch.ones(size))
    same(results[2], one * 0)


def test_unnamed_operations_of_different_kinds_in_different_orders(cluster):
    cluster.run(unnamed_out_of_step)


def thousand_in_flight() -> None:
    size = hvd.size()
    handles = [
        hvd.allreduce_async_(torch.full((50,), i), name=f"{i}", op=hvd.Sum) for i in range(1000)
    ]
    for i, handle in enumerate(handles):
        same(hvd.synchronize(handle), torch.full((50,), i * size))


def test_a_thousand_in_flight(cluster):
    cluster.run(thousand_in_flight)


def from_threads() -> None:
    size = hvd.size()
    wrong: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for step in range(25):
                tensor = torch.full((100,), float(thread * 1000 + step))
                result = hvd.allreduce(tensor, op=hvd.Sum, name=f"thread.{thread}")
                same(result, tensor * size)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_blocking_calls_from_several_threads(cluster):
    cluster.run(from_threads)


def life_of_a_handle() -> None:
    size = hvd.size()
    handle = hvd.allreduce_async(torch.ones(2), name="life", op=hvd.Sum)
    assert isinstance(handle, hvd.Handle)
    assert {handle: "value"}[handle] == "value"
    assert "allreduce.life" in repr(handle)
    assert handle.wait() is True and handle.wait(0.0) is True
    assert handle.done() and hvd.poll(handle) is True
    same(hvd.synchronize(handle), torch.full((2,), float(size)))
    assert hvd.synchronize(handle) is None
    assert handle.done() and handle.wait()
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(handle)
    with pytest.raises(ValueError, match="synchronized"):
        handle.get_future()
    for stranger in (0, 12345, None, "allreduce.life"):
        assert hvd.synchronize(stranger) is None
        with pytest.raises(ValueError, match="handle"):
            hvd.poll(stranger)


def test_the_life_of_a_handle(cluster):
    cluster.run(life_of_a_handle)


def waits_for_the_slowest() -> None:
    """An operation is not done before the last rank has submitted it."""
    rank, size = hvd.rank(), hvd.size()
    if rank == size - 1:
        hvd.barrier()  # the others have looked
        handle = hvd.allreduce_async(torch.ones(1), name="late")
    else:
        handle = hvd.allreduce_async(torch.ones(1), name="late")
        assert handle.wait(0.05) is False
        assert not handle.done() and hvd.poll(handle) is False
        hvd.barrier()
    same(hvd.synchronize(handle), torch.ones(1))


@pytest.mark.np(2, 3)
def test_an_operation_waits_for_the_last_rank(cluster):
    cluster.run(waits_for_the_slowest)


class Alarm(Exception):
    """Raised by the signal handler below."""


def interrupted_wait() -> None:
    """A signal handler runs during a blocking wait, and may end it; the operation goes on."""

    def ring(number: int, frame: object) -> None:
        raise Alarm

    if hvd.rank() > 0:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(1), name="slow")
    else:
        handle = hvd.allreduce_async(torch.ones(1), name="slow")
        previous = signal.signal(signal.SIGALRM, ring)
        try:
            for wait in (lambda: hvd.synchronize(handle), handle.wait):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                with pytest.raises(Alarm):
                    wait()
                assert hvd.poll(handle) is False
        finally:
            signal.signal(signal.SIGALRM, previous)
        hvd.barrier()
    same(hvd.synchronize(handle), torch.ones(1))


@pytest.mark.np(2, 3)
def test_signals_are_handled_while_waiting(cluster):
    cluster.run(interrupted_wait)


def nobody_holds_the_tensors() -> None:
    """Operations in flight keep their tensors; a handle that is dropped does not end them."""
    size = hvd.size()
    handles = [
        hvd.allreduce_async(torch.full((20_000,), float(i)), name=f"kept.{i}", op=hvd.Sum)
        for i in range(20)
    ]
    target = torch.ones(1000)
    hvd.allreduce_async_(target, name="dropped", op=hvd.Sum)
    gc.collect()
    junk = [torch.rand(20_000) for _ in range(40)]
    for i, handle in enumerate(handles):
        same(hvd.synchronize(handle), torch.full((20_000,), float(i * size)))
    assert len(junk) == 40
    hvd.allreduce_(torch.ones(1), name="dropped")  # raises if the first were still in flight here
    same(target, torch.full((1000,), float(size)))


def test_tensors_outlive_their_names(cluster):
    cluster.run(nobody_holds_the_tensors)


def futures() -> None:
    size = hvd.size()
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    future = handle.get_future()
    assert handle.get_future() is future
    doubled = future.then(lambda done: done.value() * 2)
    same(doubled.wait(), torch.full((3,), 2.0 * size))
    same(hvd.synchronize(handle), torch.full((3,), 1.0 * size))
    same(future.wait(), torch.full((3,), 1.0 * size))
    group = hvd.grouped_allreduce_async_([torch.ones(1), torch.ones(2)], op=hvd.Sum)
    result = group.get_future().wait()
    assert type(result) is tuple and len(result) == 2
    same(result[1], torch.full((2,), float(size)))
    hvd.synchronize(group)


def test_futures(cluster):
    cluster.run(futures)


def waiting_in_a_callback() -> None:
    """Refused where it would wait for itself: on the thread that completes operations."""
    inner = []

    def callback(_: object) -> None:
        inner.append(hvd.allreduce_async(torch.ones(1), name="inner", op=hvd.Sum))
        hvd.synchronize(inner[0])

    last = hvd.rank() == hvd.size() - 1
    if not last:
        handle = hvd.allreduce_async(torch.ones(1), name="outer")
        chained = handle.get_future().then(callback)
    hvd.barrier()  # the last rank submits when the others have their callback
    if last:
        hvd.allreduce(torch.ones(1), name="outer")
        total = hvd.allreduce(torch.ones(1), name="inner", op=hvd.Sum)
    else:
        with pytest.raises(RuntimeError, match="in a thread of your own"):
            chained.wait()
        hvd.synchronize(handle)
        total = hvd.synchronize(inner[0])
    same(total, torch.full((1,), float(hvd.size())))


@pytest.mark.np(2, 3)
def test_a_callback_that_waits_is_refused(cluster):
    cluster.run(waiting_in_a_callback)


def failed_future() -> None:
    handle = hvd.allreduce_async(torch.ones(1 + hvd.rank()), name="future")
    future = handle.get_future()
    with pytest.raises(RuntimeError, match=r"allreduce\.future"):
        future.wait()
    with pytest.raises(hvd.HorovodInternalError, match=r"allreduce\.future"):
        hvd.synchronize(handle)


@pytest.mark.np(2)
def test_the_future_of_a_failed_operation(cluster):
    cluster.run(failed_future)
