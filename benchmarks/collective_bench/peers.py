"""Who is measured: one class per library, all with the same methods; `PEERS` is their table.

To add a library, write its class and add a row. One that needs an interpreter of its own overrides
`prepare` and `sample` instead of the collectives, and forwards both to a process beside each rank:
InCompanion does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from companions.beside import Companion
from torch import Tensor

from collective_bench.cases import ROOT, Case


class Peer:
    """A library under test in this process."""

    name: str
    _case: Case
    _inputs: list[Tensor]
    _expected: list[Tensor]
    _tensors: list[Tensor]
    _run: Callable[[], Sequence[Tensor]]

    # ---- what a library must have ----

    @classmethod
    def missing(cls) -> str | None:
        """Why it cannot be measured here, or None."""
        return None

    def setup(self) -> None:
        """Connect the ranks."""

    def close(self) -> None:
        """Take leave."""

    def version(self) -> str:
        """For the head of the report."""
        raise NotImplementedError

    def takes(self, case: Case) -> bool:
        """Whether the library can do it at all; else it has no row of this case."""
        return True

    def allreduce_(self, tensor: Tensor, op: str) -> Tensor:
        """In place, blocking; op is "sum" or "average"."""
        raise NotImplementedError

    def allreduce_many_(self, tensors: Sequence[Tensor], op: str) -> Sequence[Tensor]:
        """In place: start all, then wait for all."""
        raise NotImplementedError

    def allgather(self, tensor: Tensor) -> Tensor:
        """The ranks' tensors one after another, blocking."""
        raise NotImplementedError

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """In place from rank ROOT, blocking."""
        raise NotImplementedError

    def alltoall(self, tensor: Tensor) -> Tensor:
        """An equal part of the tensor to each rank, one from each in rank order; blocking."""
        raise NotImplementedError

    def reducescatter(self, tensor: Tensor, op: str) -> Tensor:
        """This rank's equal part of the reduced tensor, blocking; op is "sum" or "average"."""
        raise NotImplementedError

    # ---- one measurement ----

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` where this library's users would have it."""
        return tensor.clone()

    def prepare(self, case: Case, rank: int) -> None:
        """Make the tensors of `case`; nothing of this is timed."""
        self._case = case
        self._inputs = [case.input(rank, i) for i in range(case.tensors)]
        self._expected = [case.result(rank, i) for i in range(case.tensors)]
        if case.collective == "broadcast" and rank != ROOT:
            self._inputs = [torch.zeros_like(tensor) for tensor in self._inputs]
        self._tensors = [self.place(tensor) for tensor in self._inputs]
        tensors, first = self._tensors, self._tensors[0]
        if case.tensors > 1:
            self._run = lambda: self.allreduce_many_(tensors, case.op)
            return
        run_one: dict[str, Callable[[], Tensor]] = {
            "allreduce": lambda: self.allreduce_(first, case.op),
            "allgather": lambda: self.allgather(first),
            "broadcast": lambda: self.broadcast_(first),
            "alltoall": lambda: self.alltoall(first),
            "reducescatter": lambda: self.reducescatter(first, case.op),
        }
        run = run_one[case.collective]
        self._run = lambda: [run()]

    def sample(self, start: Callable[[], None]) -> tuple[int, int]:
        """Run the prepared case once: (nanoseconds on this rank, wrong elements on this rank)."""
        for tensor, value in zip(self._tensors, self._inputs, strict=True):
            tensor.copy_(value)  # the last round's result is in it
        start()
        begin = time.perf_counter_ns()
        results = self._run()
        elapsed = time.perf_counter_ns() - begin
        wrong = sum(
            int((result != expected).sum()) if result.shape == expected.shape else expected.numel()
            for result, expected in zip(results, self._expected, strict=True)
        )
        return elapsed, wrong


class Hvdtorch(Peer):
    """hvdtorch, on whatever transport it chooses."""

    name = "hvdtorch"

    def setup(self) -> None:
        import hvdtorch as hvd

        self._hvd = hvd
        self._ops = {"sum": hvd.Sum, "average": hvd.Average}
        hvd.init()

    def close(self) -> None:
        self._hvd.shutdown()

    def version(self) -> str:
        from hvdtorch.config import Config

        config = Config.from_env()
        return (
            f"{self._hvd.__version__}, fusion threshold {config.fusion_threshold} bytes, "
            f"cycle time {config.cycle_time:g} ms, inline limit {config.inline_limit} bytes"
        )

    def prepare(self, case: Case, rank: int) -> None:
        super().prepare(case, rank)
        # Gradients have names that come back every step; so do these.
        self._names = [f"{self.name}.{case.title()}.{i}" for i in range(case.tensors)]

    def allreduce_(self, tensor: Tensor, op: str) -> Tensor:
        return self._hvd.allreduce_(tensor, name=self._names[0], op=self._ops[op])

    def allreduce_many_(self, tensors: Sequence[Tensor], op: str) -> Sequence[Tensor]:
        start, finish, code = self._hvd.allreduce_async_, self._hvd.synchronize, self._ops[op]
        handles = [start(t, name=n, op=code) for t, n in zip(tensors, self._names, strict=True)]
        return [finish(handle) for handle in handles]

    def allgather(self, tensor: Tensor) -> Tensor:
        return self._hvd.allgather(tensor, name=self._names[0])

    def broadcast_(self, tensor: Tensor) -> Tensor:
        return self._hvd.broadcast_(tensor, ROOT, name=self._names[0])

    def alltoall(self, tensor: Tensor) -> Tensor:
        return self._hvd.alltoall(tensor, name=self._names[0])

    def reducescatter(self, tensor: Tensor, op: str) -> Tensor:
        return self._hvd.reducescatter(tensor, name=self._names[0], op=self._ops[op])


class HvdtorchArena(Hvdtorch):
    """The same job, with tensors in memory that all ranks of the host share."""

    name = "hvdtorch-arena"

    @classmethod
    def missing(cls) -> str | None:
        import hvdtorch as hvd

        return None if hasattr(hvd, "shared_empty") else "this hvdtorch has no hvd.shared_empty()"

    def version(self) -> str:
        return "tensors made by hvd.shared_empty()"

    def close(self) -> None:
        """The job is Hvdtorch's; the tensors have to go before it ends."""
        self._tensors = []
        self._run = list

    def place(self, tensor: Tensor) -> Tensor:
        return self._hvd.shared_empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


class Gloo(Peer):
    """torch.distributed with its Gloo backend."""

    name = "gloo"

    def setup(self) -> None:
        # A group of its own: the default one belongs to the benchmark.
        self._group = dist.new_group(backend="gloo")
        # Older torch knows them by their second names only.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def version(self) -> str:
        return f"torch.distributed {torch.__version__}"

    def _average(self, tensor: Tensor) -> Tensor:
        # Gloo sums only, so its users divide; integers as hvdtorch does, toward zero.
        if tensor.is_floating_point():
            return tensor.div_(self._case.size)
        return tensor.div_(self._case.size, rounding_mode="trunc")

    def allreduce_(self, tensor: Tensor, op: str) -> Tensor:
        dist.all_reduce(tensor, group=self._group)
        return self._average(tensor) if op == "average" else tensor

    def allreduce_many_(self, tensors: Sequence[Tensor], op: str) -> Sequence[Tensor]:
        works = [dist.all_reduce(t, group=self._group, async_op=True) for t in tensors]
        for work in works:
            work.wait()
        return [self._average(t) for t in tensors] if op == "average" else tensors

    def allgather(self, tensor: Tensor) -> Tensor:
        output = tensor.new_empty(self._case.count)
        self._gather(output, tensor, group=self._group)
        return output

    def broadcast_(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, ROOT, group=self._group)
        return tensor

    def alltoall(self, tensor: Tensor) -> Tensor:
        output = torch.empty_like(tensor)
        dist.all_to_all_single(output, tensor, group=self._group)
        return output

    def reducescatter(self, tensor: Tensor, op: str) -> Tensor:
        output = tensor.new_empty(self._case.count // self._case.size)
        self._scatter(output, tensor, group=self._group)
        return self._average(output) if op == "average" else output


class InCompanion(Peer):
    """Horovod, over Gloo or MPI, in a companion process beside each rank: see companions."""

    def __init__(self, kind: str, python: Path) -> None:
        self.name = f"horovod-{kind}"
        self._kind, self._python = kind, python

    def takes(self, case: Case) -> bool:
        return case.dtype_name != "bfloat16"  # which Horovod refuses on the CPU

    def setup(self) -> None:
        served = "collective_bench.horovod_peer:Horovod"
        self._companion = Companion(self._python, self._kind, served)

    def close(self) -> None:
        self._companion.close()

    def version(self) -> str:
        return self._companion.version()

    def prepare(self, case: Case, rank: int) -> None:
        self._companion.call("prepare", case, rank)

    def sample(self, start: Callable[[], None]) -> tuple[int, int]:
        start()  # the companions have a start of their own; this one lets the ranks finish
        return self._companion.call("sample_there")


OURS = ("hvdtorch", "hvdtorch-arena")
IN_COMPANION = ("horovod-gloo", "horovod-mpi")
PEERS: dict[str, type[Peer]] = {"hvdtorch-arena": HvdtorchArena, "gloo": Gloo}
NAMES = (*PEERS, *IN_COMPANION)


def makers(names: Sequence[str], horovod_python: Path | None) -> dict[str, Callable[[], Peer]]:
    """How to make each of `names`, which are of NAMES."""
    made: dict[str, Callable[[], Peer]] = {}
    for name in names:
        if name in PEERS:
            made[name] = PEERS[name]
        else:
            assert horovod_python is not None  # the command line was checked
            made[name] = partial(InCompanion, name.removeprefix("horovod-"), horovod_python)
    return made
