"""Who trains: one class per way to reduce gradients, all with the same loop."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from companions.beside import Companion
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from training_bench import models


class Trainer:
    """A column of the table. Methods are called on all ranks together."""

    name: str
    reduces = True  # gradients, so that all ranks hold the same weights

    def setup(self) -> None:
        """Connect the ranks."""

    def close(self) -> None:
        """Take leave."""

    def version(self) -> str:
        """For the head of the report."""
        raise NotImplementedError

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """What a user of the library does to a model and its optimizer."""
        raise NotImplementedError

    def missing(self, model_name: str) -> str | None:
        """Why it cannot train that model, or None."""
        return models.missing(model_name)

    def prepare(self, model_name: str, rank: int) -> None:
        """A new model and its batches."""
        self._bare = models.make(model_name)
        self._model, self._optimizer = self.distribute(self._bare, models.optimizer(self._bare))
        self._batches = models.batches(model_name, rank)
        self._steps = 0

    def step(self) -> Any:
        """One training step; the loss."""
        inputs, labels = self._batches[self._steps % models.BATCHES]
        self._steps += 1
        self._optimizer.zero_grad()
        loss = cross_entropy(self._model(inputs), labels)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def losses(self, steps: int) -> list[float]:
        """Of the next steps."""
        return [self.step().item() for _ in range(steps)]

    def sample(self, barrier: Callable[[], None], steps: int) -> tuple[int, int]:
        """So many steps in a row: nanoseconds of one, and 0 (weights are compared at the end)."""
        barrier()
        begin = time.perf_counter_ns()
        for _ in range(steps):
            self.step()
        return (time.perf_counter_ns() - begin) // steps, 0

    def digest(self) -> str:
        """Of all weights, bit for bit."""
        found = hashlib.sha256()
        for parameter in self._bare.parameters():
            found.update(parameter.detach().contiguous().numpy().tobytes())
        return found.hexdigest()

    def drop(self) -> None:
        """Forget the model."""
        del self._bare, self._model, self._optimizer


class Independent(Trainer):
    """As many processes at the same time, each alone with its model."""

    name = "independent"
    reduces = False

    def version(self) -> str:
        return "no communication"

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        return model, optimizer


class DistributedOptimizer(Trainer):
    """A module with Horovod's API: hvdtorch, or in a companion Horovod itself."""

    hvd: Any

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        named = list(model.named_parameters())
        optimizer = self.hvd.DistributedOptimizer(optimizer, named_parameters=named)
        self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, optimizer


class Hvdtorch(DistributedOptimizer):
    """hvdtorch with its default settings."""

    name = "hvdtorch"

    def setup(self) -> None:
        import hvdtorch as hvd

        self.hvd = hvd
        hvd.init()

    def close(self) -> None:
        self.hvd.shutdown()

    def version(self) -> str:
        return str(self.hvd.__version__)


class Ddp(Trainer):
    """DistributedDataParallel over Gloo."""

    name = "ddp-gloo"

    def setup(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def version(self) -> str:
        return "DistributedDataParallel over Gloo, without its broadcast of buffers"

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        # No other column sends the running means of batch normalisation around.
        known = inspect.signature(DistributedDataParallel).parameters
        switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        wrapped = DistributedDataParallel(model, process_group=self._group, **{switch: False})
        return wrapped, optimizer


class InCompanion(Trainer):
    """Horovod, over Gloo or MPI, in a companion process beside each rank: see companions."""

    def __init__(self, kind: str, python: Path) -> None:
        self.name = f"horovod-{kind}"
        self._kind, self._python = kind, python

    def setup(self) -> None:
        served = "training_bench.horovod_side:Horovod"
        self._companion = Companion(self._python, self._kind, served)

    def close(self) -> None:
        self._companion.close()

    def version(self) -> str:
        return self._companion.version()

    def missing(self, model_name: str) -> str | None:
        return self._companion.call("missing", model_name)

    def prepare(self, model_name: str, rank: int) -> None:
        self._companion.call("prepare", model_name, rank)

    def losses(self, steps: int) -> list[float]:
        return self._companion.call("losses", steps)

    def sample(self, barrier: Callable[[], None], steps: int) -> tuple[int, int]:
        barrier()  # the companions have a barrier of their own; this one lets the ranks finish
        return self._companion.call("sample_there", steps)

    def digest(self) -> str:
        return self._companion.call("digest")

    def drop(self) -> None:
        self._companion.call("drop")


IN_COMPANION = ("horovod-gloo", "horovod-mpi")
PEERS: dict[str, type[Trainer]] = {"ddp-gloo": Ddp}
NAMES = (*PEERS, *IN_COMPANION)


def make(names: Sequence[str], horovod_python: Path | None) -> list[Trainer]:
    """The baseline, hvdtorch, and the peers of those names."""
    made: list[Trainer] = [Independent(), Hvdtorch()]
    for name in names:
        if name in PEERS:
            made.append(PEERS[name]())
        else:
            assert horovod_python is not None  # the command line was checked
            made.append(InCompanion(name.removeprefix("horovod-"), horovod_python))
    return made
