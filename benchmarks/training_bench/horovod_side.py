"""Horovod's part, in the companion process of a rank (it needs an interpreter of its own)."""

from __future__ import annotations

import horovod
import horovod.torch as hvd
import torch
import torch.distributed as dist

from training_bench.trainers import DistributedOptimizer


class Horovod(DistributedOptimizer):
    """horovod.torch with its default settings."""

    name = "horovod"
    hvd = hvd

    def version(self) -> str:
        return f"Horovod {horovod.__version__}, torch {torch.__version__}, its default settings"

    def sample_there(self, steps: int) -> tuple[int, int]:
        """sample(), after a barrier among the companions."""
        return self.sample(dist.barrier, steps)
