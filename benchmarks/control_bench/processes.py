"""Real jobs on this machine: what one negotiation costs, at several numbers of ranks.

The ranks are forked from a process that has imported torch, so that 64 of them start in seconds and
fit into memory. They are more than the cores: their waiting times say little, what they need of the
CPU says more.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from bench_tools.lifetime import end_with
from bench_tools.rounds import percentile

WARM_UP = 5
SECONDS = 300  # for a job, its start included
NO_INLINING = {"HVDTORCH_INLINE_LIMIT": "0", "HVDTORCH_LONE_INLINE_LIMIT": "0"}


@dataclass(frozen=True)
class Row:
    """One kind of operation, blocking, one after the other. Per operation; times in microseconds.

    `cpu_..`: of all threads of the process. `frames_..`, `bytes_..`: what was sent of the control
    plane. `other`: the mean of the ranks that are not rank 0.
    """

    kind: str  # barrier; inline: 4 B allreduce inside the log; launch: the same, announced
    np: int
    operations: int
    median_us: float
    p99_us: float
    cpu_rank0_us: float
    cpu_other_us: float
    frames_rank0: float
    bytes_rank0: float
    frames_other: float
    bytes_other: float


class JobFailed(RuntimeError):
    """A rank ended with an error, or the job took too long."""


def rows(sizes: list[int], operations: int) -> Iterator[Row]:
    """All kinds of operation, job by job; each has about `operations`, fewer with many ranks."""
    for size in sizes:
        yield from _job(size, max(20, operations * 2 // size))


def _job(size: int, operations: int) -> list[Row]:
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (size, port, operations, os.getpid(), sending)
    ranks = [
        context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(size)
    ]
    try:
        for rank in ranks:
            rank.start()
        sending.close()
        deadline = time.monotonic() + SECONDS
        running = {rank.sentinel: index for index, rank in enumerate(ranks)}
        found: list[Row] = []
        while running:
            ready = wait([*running, *([] if found else [receiving])], deadline - time.monotonic())
            if not ready:
                raise JobFailed(f"a job of {size} ranks took more than {SECONDS} s")
            for event in ready:
                if event is receiving:
                    found = _receive(receiving, size)
                    continue
                rank = ranks[running.pop(event)]
                rank.join()
                if rank.exitcode != 0:
                    raise JobFailed(f"a rank of {size} ended with status {rank.exitcode}")
        return found
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()


def _receive(receiving: Connection, size: int) -> list[Row]:
    try:
        return receiving.recv()
    except EOFError:
        raise JobFailed(f"rank 0 of {size} ended without a result") from None


def _rank(
    rank: int, size: int, port: int, operations: int, parent: int, results: Connection
) -> None:
    end_with(parent)
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"HVDTORCH_START_TIMEOUT": str(SECONDS)}
    import hvdtorch as hvd

    tensor = torch.ones(1)
    found = []
    hvd.init()
    found.append(_measure(hvd, "barrier", operations, hvd.barrier))
    inline = lambda: hvd.allreduce_(tensor, name="inline", op=hvd.Sum)  # noqa: E731
    found.append(_measure(hvd, "inline", operations, inline))
    hvd.shutdown()
    os.environ |= NO_INLINING
    hvd.init()
    launch = lambda: hvd.allreduce_(tensor, name="launch", op=hvd.Sum)  # noqa: E731
    found.append(_measure(hvd, "launch", operations, launch))
    if rank == 0:
        results.send(found)
    hvd.barrier()
    hvd.shutdown()


def _measure(hvd: Any, kind: str, operations: int, run: Callable[[], object]) -> Row:
    from hvdtorch import _C

    for _ in range(WARM_UP):
        run()
    sent, cpu, times = _C.stats(), time.process_time_ns(), []
    for _ in range(operations):
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    cpu = time.process_time_ns() - cpu
    now = _C.stats()
    own = [
        cpu / 1000,
        now["frames_sent"] - sent["frames_sent"],
        now["frame_bytes_sent"] - sent["frame_bytes_sent"],
    ]
    everybody = hvd.allgather(torch.tensor([own], dtype=torch.float64), name=f"{kind}.counts")
    rank0 = (everybody[0] / operations).tolist()
    other = (everybody[1:].mean(dim=0) / operations).tolist()
    return Row(
        kind=kind,
        np=hvd.size(),
        operations=operations,
        median_us=statistics.median(times) / 1000,
        p99_us=percentile(times, 0.99) / 1000,
        cpu_rank0_us=rank0[0],
        cpu_other_us=other[0],
        frames_rank0=rank0[1],
        bytes_rank0=rank0[2],
        frames_other=other[1],
        bytes_other=other[2],
    )
