"""Where this process stands in the job, and where the ranks meet.

`find_launch` reads the launcher's environment: torchrun, hvdrun, or anything that sets RANK and
WORLD_SIZE (and LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without it this is a job of
one process. `open_store` gives the key-value store at MASTER_ADDR:MASTER_PORT through torch's own
rendezvous, so a script may use `torch.distributed` beside hvdtorch, whichever comes first.
`place` computes local and cross ranks from what all ranks said of themselves.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hvdtorch.config import Config


@dataclass(frozen=True)
class Launch:
    """What the launcher told this process."""

    rank: int
    size: int
    local_rank: int | None = None  # None: not told
    local_size: int | None = None
    group_rank: str = ""  # torchrun's agent: two agents on one machine count as two hosts
    master: str = ""  # MASTER_ADDR


@dataclass(frozen=True)
class Placement:
    """Where one rank stands. Cross: among the ranks with its local rank, one per host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Introduction:
    """What a rank tells the others about itself when it arrives."""

    host_id: str  # equal on ranks of one host
    hostname: str  # for error texts
    local_rank: int | None
    local_size: int | None
    version: str


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise ValueError(f"{name}={text!r} is not a non-negative integer; the launcher sets it")
    return value


def find_launch(environ: Mapping[str, str]) -> Launch:
    """Rank and size as the launcher set them; a job of one process if it set neither.

    Raises ValueError if the variables contradict each other, or if another launcher started
    several ranks without setting them (they would train apart, each on its own).
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        for variable, launcher in (
            ("OMPI_COMM_WORLD_SIZE", "mpirun"),
            ("PMI_SIZE", "mpiexec"),
            ("SLURM_STEP_NUM_TASKS", "srun"),
            ("HOROVOD_SIZE", "Horovod's horovodrun"),
        ):
            if environ.get(variable, "1") not in ("", "1"):
                raise ValueError(
                    f"{launcher} started {environ[variable]} ranks ({variable}), which this "
                    "version of hvdtorch does not read: start the script with hvdrun or torchrun, "
                    "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"
                )
        return Launch(0, 1)
    for name in ("RANK", "WORLD_SIZE"):
        if name not in environ:
            raise ValueError(f"{name} is not set although its companion is; the launcher sets both")
    rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if rank >= size:
        raise ValueError(f"RANK={rank} is not below WORLD_SIZE={size}")
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise ValueError(f"{name} is not set: {size} ranks need an address to meet at")
    told = "LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" in environ
    local_rank = _integer(environ, "LOCAL_RANK") if told else None
    local_size = _integer(environ, "LOCAL_WORLD_SIZE") if told else None
    if local_rank is not None and local_size is not None and local_rank >= local_size:
        raise ValueError(f"LOCAL_RANK={local_rank} is not below LOCAL_WORLD_SIZE={local_size}")
    return Launch(
        rank,
        size,
        local_rank,
        local_size,
        environ.get("GROUP_RANK", ""),
        environ.get("MASTER_ADDR", ""),
    )


_store: dist.Store | None = None


def open_store(launch: Launch, timeout: float) -> dist.Store:
    """The job's key-value store; opened once, and kept over shutdown() and init().

    `timeout` in seconds bounds the connection. Raises ConnectionError naming the address.
    """
    global _store
    if _store is None:
        try:
            _store, _, _ = next(
                dist.rendezvous(
                    "env://", launch.rank, launch.size, timeout=timedelta(seconds=timeout)
                )
            )
        except Exception as error:
            raise ConnectionError(
                f"rank {launch.rank} cannot open the job's store on {launch.master} within "
                f"{timeout:g} s (MASTER_ADDR, MASTER_PORT): {error}"
            ) from error
    return _store


def introduce(launch: Launch, config: Config, version: str) -> Introduction:
    """This rank's introduction. A host is a boot id and a host name, unless the setting host_id
    says otherwise; two containers on one machine therefore count as two hosts."""
    hostname = config.hostname or socket.gethostname()
    if config.host_id:
        return Introduction(config.host_id, hostname, None, None, version)
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    identity = boot_id.read_text().strip() if boot_id.exists() else ""
    host_id = f"{identity}:{socket.gethostname()}:{launch.group_rank}"
    return Introduction(host_id, hostname, launch.local_rank, launch.local_size, version)


def place(introductions: list[Introduction]) -> list[Placement]:
    """Placement of every rank, in rank order.

    Local ranks are the launcher's where every rank was told one, else the order of ranks on each
    host. Raises ValueError if two ranks claim one place, or the ranks run different versions.
    """
    size = len(introductions)
    versions = sorted({i.version for i in introductions})
    if len(versions) > 1:
        by_version = {
            v: [r for r, i in enumerate(introductions) if i.version == v] for v in versions
        }
        raise ValueError(
            "the ranks run different versions of hvdtorch or torch: "
            + "; ".join(f"{v} on ranks {ranks}" for v, ranks in by_version.items())
        )
    hosts: dict[str, list[int]] = {}
    for rank, introduction in enumerate(introductions):
        hosts.setdefault(introduction.host_id, []).append(rank)
    trusted = all(i.local_rank is not None and i.local_size is not None for i in introductions)
    local: dict[int, tuple[int, int]] = {}
    for ranks in hosts.values():
        claimed: dict[int, int] = {}
        for index, rank in enumerate(ranks):
            introduction = introductions[rank]
            place_here = (index, len(ranks))
            if trusted:
                assert introduction.local_rank is not None and introduction.local_size is not None
                place_here = (introduction.local_rank, introduction.local_size)
            if place_here[0] in claimed:
                raise ValueError(
                    f"ranks {claimed[place_here[0]]} and {rank} both have local rank "
                    f"{place_here[0]} on host {introduction.hostname}: LOCAL_RANK must differ "
                    "between the processes of one host"
                )
            claimed[place_here[0]] = rank
            local[rank] = place_here
    across: dict[int, list[int]] = {}  # local rank -> ranks, one per host, in order of hosts
    for ranks in hosts.values():
        for rank in ranks:
            across.setdefault(local[rank][0], []).append(rank)
    return [
        Placement(
            rank,
            size,
            *local[rank],
            across[local[rank][0]].index(rank),
            len(across[local[rank][0]]),
        )
        for rank in range(size)
    ]
