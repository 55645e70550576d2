"""Which ranks share memory, agreed while the job starts; and tensors in that memory.

The lowest rank of each host makes the memory and says through the store how to open it; the others
of the host open it; every one says how that went. Where it failed for one rank, the ranks of that
host exchange data through sockets, as if each were on a host of its own, and rank 0 warns. So
whether memory is shared depends on trying it, not on names.
"""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdtorch import _C
from hvdtorch.log import logger


@dataclass(frozen=True)
class Shared:
    """What one rank shares with others."""

    group: _C.HostGroup | None  # None: it shares memory with nobody
    group_of: list[int]  # by rank: the number of its group; ranks of one group share memory

    @staticmethod
    def nothing(size: int) -> Shared:
        """Every rank alone."""
        return Shared(None, list(range(size)))


def share_memory(
    store: dist.Store, rank: int, host_of: Sequence[int], hosts: Sequence[str], deadline: float
) -> Shared:
    """Called by all ranks at once. `host_of`: by rank, its host's number; `hosts`: their names.

    `deadline` by time.monotonic(). Raises TimeoutError if a rank says nothing until then.
    """
    members: dict[int, list[int]] = {}
    for each, host in enumerate(host_of):
        members.setdefault(host, []).append(each)
    sharing = [ranks for ranks in members.values() if len(ranks) > 1]
    if not sharing:
        return Shared.nothing(len(host_of))
    group = None
    own = members[host_of[rank]]
    if len(own) > 1:
        group, failure = _open(store, rank, own, deadline)
        store.set(f"result/{rank}", failure)
    if rank == 0:
        store.set("failed", json.dumps(_failed(store, sharing, host_of, hosts, deadline)))
    failed: list[int] = json.loads(_get(store, "failed", 0, deadline))
    if host_of[rank] in failed:
        group = None
    group_of = [
        len(members) + each if host in failed else host for each, host in enumerate(host_of)
    ]
    return Shared(group, group_of)


def _open(
    store: dist.Store, rank: int, own: Sequence[int], deadline: float
) -> tuple[_C.HostGroup | None, str]:
    """The group of the ranks `own`, or why there is none."""
    try:
        if rank == own[0]:
            try:
                group = _C.HostGroup.create(len(own))
            except RuntimeError:
                store.set(f"address/{rank}", "null")
                raise
            store.set(f"address/{rank}", json.dumps(group.address()))
            return group, ""
        address = json.loads(_get(store, f"address/{own[0]}", own[0], deadline))
        if address is None:
            return None, "another rank of this host has none"
        return _C.HostGroup.open(own.index(rank), len(own), *address), ""
    except RuntimeError as error:
        return None, str(error)


def _failed(
    store: dist.Store,
    sharing: Sequence[Sequence[int]],
    host_of: Sequence[int],
    hosts: Sequence[str],
    deadline: float,
) -> list[int]:
    """Rank 0: the numbers of the hosts whose ranks cannot share memory."""
    failed = []
    for ranks in sharing:
        failures = {each: _get(store, f"result/{each}", each, deadline) for each in ranks}
        told = [(each, why) for each, why in failures.items() if why]
        if told:
            failed.append(host_of[ranks[0]])
            logger.warning(
                "the ranks of host %s exchange data through sockets, which is slower, because rank "
                "%s cannot share memory with them: %s",
                hosts[ranks[0]],
                *told[0],
            )
    return failed


def _get(store: dist.Store, key: str, rank: int, deadline: float) -> str:
    left = max(deadline - time.monotonic(), 0.001)
    try:
        store.wait([key], timedelta(seconds=left))
    except Exception as error:
        raise TimeoutError(
            f"rank {rank} went no further in hvd.init() within the start timeout "
            "(HVDTORCH_START_TIMEOUT, hvdrun --start-timeout): has it died?"
        ) from error
    return bytes(store.get(key)).decode()


def shared_empty(*size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor in memory that the ranks of this host share.

    Use it like one of `torch.empty`. Collectives that find their tensor in such memory on all ranks
    of the host work on it where it is, without copies: allreduce in place, reducescatter of it. On
    a host with one rank, and where memory cannot be shared, it is ordinary memory. Only this rank
    writes to it, except while an operation on it is in flight. It may be used after `shutdown()`,
    then as ordinary memory.

    Parameters
    ----------
    size
        Its shape, as ints or one sequence of ints.
    dtype
        Default: torch's default dtype.

    Raises
    ------
    TypeError
        A length that is no integer, a dtype that is none.
    ValueError
        There is no tensor of that shape.
    MemoryError
        It does not fit into memory.
    HorovodInternalError
        hvdtorch is not initialised.
    """
    listed = len(size) == 1 and isinstance(size[0], Sequence) and not isinstance(size[0], str)
    shape = [operator.index(length) for length in (size[0] if listed else size)]
    if dtype is None:
        dtype = torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"shared_empty(dtype=...) takes a torch.dtype, not {dtype!r}")
    nbytes = math.prod(shape) * dtype.itemsize
    span = math.prod(max(length, 1) for length in shape) * dtype.itemsize  # of its strides
    if min(shape, default=0) < 0 or span >= 2**63:
        raise ValueError(f"shared_empty: there is no tensor of shape {shape}")
    try:
        return _C.shared_empty(shape, dtype)
    except MemoryError:
        raise MemoryError(f"shared_empty: no memory for {nbytes} bytes") from None
