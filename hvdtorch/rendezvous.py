"""How the ranks of a job find each other: from a store to a running native core.

Every rank puts an introduction into the store. Rank 0 collects them, places everybody, opens the
control port, and answers with one welcome that holds what all ranks must have alike: placements,
host names, addresses, and the settings that the log's rules depend on. If rank 0 finds a fault the
welcome carries it, so that every rank raises the same error. Keys carry a round number, so init()
after shutdown() never reads what an earlier round left.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hvdtorch import connect
from hvdtorch.bootstrap import Introduction, Launch, Placement, introduce, place
from hvdtorch.config import Config
from hvdtorch.log import logger
from hvdtorch.shared_memory import Shared, share_memory

# Settings that decide what travels and in which order: rank 0's count for all.
SHARED_SETTINGS = (
    "bucket_size",
    "fusion_threshold",
    "cycle_time",
    "cache_capacity",
    "inline_limit",
    "lone_inline_limit",
    "disable_group_fusion",
    "join_divisor",
    "shared_memory",
)


@dataclass(frozen=True)
class Meeting:
    """What a rank needs to start its runtime."""

    placement: Placement
    homogeneous: bool  # every host has as many ranks
    hosts: list[str]
    fds: list[int]
    link: object  # torch.distributed.ProcessGroupGloo; None where all ranks share memory
    shared: Shared
    settings: dict[str, Any]


def _own_addresses(one_host: bool, config: Config, master: str) -> list[str]:
    """Addresses under which other ranks may reach this one, the likeliest first."""
    if one_host:
        return ["127.0.0.1"]
    addresses: list[str] = []
    if config.interface:
        addresses += [_interface_address(name) for name in config.interface.split(",")]
    else:
        for target in (master, socket.gethostname()):
            try:
                # No packet is sent: the kernel says which of our addresses faces the target.
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect((target, 1))
                    addresses.append(probe.getsockname()[0])
            except OSError:
                continue
    return list(dict.fromkeys(addresses))


def _interface_address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"network interface {interface!r} has no IPv4 address here ({error}); this host "
                f"has: {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _collect(store: dist.Store, size: int, deadline: float) -> list[Introduction]:
    introductions = []
    for rank in range(size):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"hello/{rank}"], timedelta(seconds=left))
        except Exception as error:
            missing = [r for r in range(rank, size) if not store.check([f"hello/{r}"])]
            raise TimeoutError(
                f"ranks {missing} of {size} did not call hvd.init() within the start timeout "
                "(HVDTORCH_START_TIMEOUT, hvdrun --start-timeout)"
            ) from error
        introductions.append(Introduction(**json.loads(store.get(f"hello/{rank}"))))
    return introductions


def _gloo(
    store: dist.Store, placement: Placement, one_host: bool, address: str, timeout: timedelta
) -> object:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    hostname = "127.0.0.1" if one_host else address
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
    options._threads = 1  # only for Gloo's own collectives, which are not used
    options._timeout = timeout
    try:
        return dist.ProcessGroupGloo(store, placement.rank, placement.size, options)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ConnectionError(
            f"rank {placement.rank} cannot connect its data transport to all other ranks: has one "
            f"of them died in hvd.init()? (Gloo: {reason})"
        ) from error


@dataclass(frozen=True)
class _Welcome:
    """Rank 0's answer to all. `key` is empty where the launcher gave every rank the job's key."""

    placements: list[dict[str, int]]
    hosts: list[str]
    host_of: list[int]  # by rank: the number of its host
    one_host: bool
    addresses: list[str]
    port: int
    key: str
    settings: dict[str, Any]


def _welcome(
    store: dist.Store, size: int, config: Config, master: str, deadline: float
) -> tuple[_Welcome, connect.Listener]:
    """Rank 0: collect, place, listen, and tell everybody, also what went wrong."""
    listener = None
    try:
        introductions = _collect(store, size, deadline)
        placements = place(introductions)
        host_ids = list(dict.fromkeys(i.host_id for i in introductions))
        one_host = len({i.host_id for i in introductions}) == 1 and not config.interface
        listener = connect.Listener("127.0.0.1" if one_host else "")
        welcome = _Welcome(
            placements=[dataclasses.asdict(p) for p in placements],
            hosts=[i.hostname for i in introductions],
            host_of=[host_ids.index(i.host_id) for i in introductions],
            one_host=one_host,
            addresses=_own_addresses(one_host, config, master),
            port=listener.port,
            key="" if config.job_key else secrets.token_hex(32),
            settings={name: getattr(config, name) for name in SHARED_SETTINGS},
        )
    except Exception as error:
        if listener is not None:
            listener.close()
        store.set("welcome", json.dumps({"error": str(error)}))
        raise
    store.set("welcome", json.dumps(dataclasses.asdict(welcome)))
    return welcome, listener


def _await_welcome(store: dist.Store, rank: int, config: Config, deadline: float) -> _Welcome:
    """The other ranks: what rank 0 answered."""
    left = max(deadline - time.monotonic(), 0.001)
    try:
        # Rank 0's own deadline passes first where both started alike: its text says more.
        store.wait(["welcome"], timedelta(seconds=left + 5))
    except Exception as error:
        raise TimeoutError(
            f"rank {rank} got no answer from rank 0 within the start timeout of "
            f"{config.start_timeout:g} s: has rank 0 called hvd.init()?"
        ) from error
    fields = json.loads(store.get("welcome"))
    if "error" in fields:
        raise RuntimeError(f"rank 0 cannot start the job: {fields['error']}")
    return _Welcome(**fields)


def meet(base: dist.Store, launch: Launch, config: Config, version: str, round_: int) -> Meeting:
    """Blocks until every rank is connected to rank 0, or raises the same error on every rank."""
    deadline = time.monotonic() + config.start_timeout
    store = dist.PrefixStore(f"hvdtorch/{round_}", base)
    own = introduce(launch, config, version)
    store.set(f"hello/{launch.rank}", json.dumps(dataclasses.asdict(own)))
    master = launch.master
    if launch.rank == 0:
        welcome, listener = _welcome(store, launch.size, config, master, deadline)
        key = bytes.fromhex(config.job_key or welcome.key)
        try:
            fds = listener.accept_all(launch.size, key, deadline)
        finally:
            listener.close()
    else:
        welcome = _await_welcome(store, launch.rank, config, deadline)
        key = bytes.fromhex(config.job_key or welcome.key)
        fds = [connect.connect(welcome.addresses, welcome.port, launch.rank, key, deadline)]
    placement = Placement(**welcome.placements[launch.rank])
    address = (_own_addresses(welcome.one_host, config, master) or ["127.0.0.1"])[0]
    limit = timedelta(seconds=config.operation_timeout or 365 * 86400)
    if welcome.settings["shared_memory"]:
        shared = share_memory(
            dist.PrefixStore("shared", store), launch.rank, welcome.host_of, welcome.hosts, deadline
        )
    else:
        shared = Shared.nothing(launch.size)
    link = None
    if len(set(shared.group_of)) > 1:
        link = _gloo(dist.PrefixStore("gloo", store), placement, welcome.one_host, address, limit)
    logger.info("%s on host %s", placement, own.hostname)
    homogeneous = len({p["local_size"] for p in welcome.placements}) == 1
    return Meeting(placement, homogeneous, welcome.hosts, fds, link, shared, welcome.settings)
