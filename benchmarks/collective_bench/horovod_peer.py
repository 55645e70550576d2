"""Horovod as a peer, in the companion process of a rank (it needs an interpreter of its own)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import horovod
import horovod.torch as hvd
import torch
from bench_tools.start import together
from torch import Tensor

from collective_bench.cases import ROOT, Case
from collective_bench.peers import Peer


class Horovod(Peer):
    """horovod.torch with its default settings."""

    name = "horovod"

    def __init__(self) -> None:
        self._ops = {"sum": hvd.Sum, "average": hvd.Average}
        self._start: Callable[[], None] | None = None

    def version(self) -> str:
        return f"Horovod {horovod.__version__}, torch {torch.__version__}, its default settings"

    def sample_there(self) -> tuple[int, int]:
        """sample(), begun by all companions at the same moment."""
        if self._start is None:
            self._start = together()
        return self.sample(self._start)

    def prepare(self, case: Case, rank: int) -> None:
        super().prepare(case, rank)
        # As gradients have them: names that come back every step.
        self._names = [f"{case.title()}.{i}" for i in range(case.tensors)]

    def allreduce_(self, tensor: Tensor, op: str) -> Tensor:
        return hvd.allreduce_(tensor, name=self._names[0], op=self._ops[op])

    def allreduce_many_(self, tensors: Sequence[Tensor], op: str) -> Sequence[Tensor]:
        code = self._ops[op]
        handles = [
            hvd.allreduce_async_(t, name=n, op=code)
            for t, n in zip(tensors, self._names, strict=True)
        ]
        return [hvd.synchronize(handle) for handle in handles]

    def allgather(self, tensor: Tensor) -> Tensor:
        return hvd.allgather(tensor, name=self._names[0])

    def broadcast_(self, tensor: Tensor) -> Tensor:
        return hvd.broadcast_(tensor, ROOT, name=self._names[0])

    def alltoall(self, tensor: Tensor) -> Tensor:
        return hvd.alltoall(tensor, name=self._names[0])

    def reducescatter(self, tensor: Tensor, op: str) -> Tensor:
        return hvd.reducescatter(tensor, name=self._names[0], op=self._ops[op])
