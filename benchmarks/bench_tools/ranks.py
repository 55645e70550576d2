"""The ranks of a benchmark: one process each, with one thread for torch's own operators."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

THREADS = 1  # per rank: ranks share the cores
# What launchers and the jobs they start leave in a rank's environment.
_LAUNCHERS = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_launcher() -> bool:
    """Whether this process is a rank already."""
    return "RANK" in os.environ


def start(script: Path, count: int, arguments: Sequence[str]) -> NoReturn:
    """Become torchrun with `count` ranks of `script` (its output carries no prefixes)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # After "--" or torchrun takes our --np for a short form of its own option.
    command += ["--nproc-per-node", str(count), "--", str(script.resolve()), *arguments]
    os.execve(command[0], command, os.environ | {"OMP_NUM_THREADS": str(THREADS)})


@contextmanager
def connected() -> Iterator[Callable[..., None]]:
    """A default Gloo group of torch.distributed, for barriers and counts only; gives print() on
    rank 0 and silence on the others."""
    torch.set_num_threads(THREADS)
    dist.init_process_group("gloo")
    try:
        yield print if dist.get_rank() == 0 else _silence
    finally:
        dist.destroy_process_group()


def environment_without_launcher() -> dict[str, str]:
    """This process's, for a child that is no rank of this job."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in _OF_A_RANK and not key.startswith(_LAUNCHERS)
    }


def from_rank_0(value: Any) -> Any:
    """What rank 0 passed, on every rank."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def _silence(*_: object, **__: object) -> None:
    pass
