"""init, shutdown, and what a rank may ask about its place in the job.

`init()` finds the launcher's settings (bootstrap.py), meets the other ranks (rendezvous.py) and
starts the native runtime. `shutdown()` leaves the job; it also runs at interpreter exit, so a
script that forgets it, or dies of an exception, takes its leave and tells the others why.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from hvdtorch import _C, buildinfo, horovod_variables, log
from hvdtorch.bootstrap import Placement, find_launch, open_store
from hvdtorch.config import LOG_LEVELS, Config
from hvdtorch.operation import BARRIER, SUM
from hvdtorch.process_sets import (
    ProcessSet,
    begin_job,
    end_job,
    find_registered,
    given_at_init,
    register,
)
from hvdtorch.rendezvous import SHARED_SETTINGS, meet
from hvdtorch.shared_memory import Shared
from hvdtorch.version import __version__

_placement: Placement | None = None
_homogeneous = True
_link: object = None
_round = 0  # init() calls of this process that met other ranks
_last_words = ""  # the exception that ends this script, told to the other ranks
_echo_fd = -1  # where hvdrun wants to hear that this rank fails because another one did
_bucket_size = 0  # see bucket_size()
_at_shutdown: list[Callable[[], None]] = []


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
) -> None:
    """Join the job: block until every rank has called it.

    Without a launcher this is a job of one process (rank 0, size 1). Calling it again while
    initialised gives `process_sets` the ids of the sets of the same ranks that are registered, and
    does nothing else; after `shutdown()` it joins anew, if all ranks do.

    Args:
        comm: None, the list of all ranks, or an mpi4py communicator of as many processes as the job
            has ranks. A part of the ranks is refused: start only those that should take part.
        process_sets: process sets to register, the same on all ranks and in the same order; sets
            made from mpi4py communicators may differ, each rank gives the one that it belongs to.
            "dynamic" is accepted; sets can always be added later.

    Raises:
        ValueError: arguments or the launcher's variables make no sense; the ranks give different
            process sets, or sets that cannot be registered: then the job is left, and init() can be
            called again.
        TimeoutError, ConnectionError, RuntimeError: the ranks did not meet within the start
            timeout (HVDTORCH_START_TIMEOUT, 30 s); the text names the ranks that are missing.
    """
    global _placement, _homogeneous, _link, _round, _echo_fd, _bucket_size
    launch = find_launch(os.environ)
    _check_communicator(comm, launch.size)
    sets = given_at_init(process_sets)
    if _C.is_running():
        find_registered(sets)
        return
    if _placement is not None:  # before it meets anybody, with the parent's connections
        raise _C.HorovodInternalError(
            f"process {os.getpid()} is a forked child of rank {_placement.rank} (a DataLoader "
            "worker?): only the rank itself may call hvd.init()"
        )
    config = Config.from_env(os.environ)
    log.configure(config.log_level, config.log_hide_time)
    if launch.rank == 0:
        horovod_variables.report(os.environ)
    _echo_fd = config.echo_fd
    if launch.size == 1:
        placement, homogeneous, hosts, fds = Placement(0, 1, 0, 1, 0, 1), True, [""], [-1]
        memory = Shared.nothing(1)
        shared: dict[str, Any] = {name: getattr(config, name) for name in SHARED_SETTINGS}
    else:
        store = open_store(launch, config.start_timeout)
        version = f"hvdtorch {__version__}, torch {torch.__version__}"
        meeting = meet(store, launch, config, version, _round)
        _round += 1
        placement, homogeneous = meeting.placement, meeting.homogeneous
        hosts, fds, shared, _link = meeting.hosts, meeting.fds, meeting.settings, meeting.link
        memory = meeting.shared
    core = _core(config, placement.local_rank)
    _bucket_size = int(shared["bucket_size"])
    _C.start(
        rank=placement.rank,
        size=placement.size,
        hosts=hosts,
        fds=fds,
        link=_link,
        group=memory.group,
        group_of=memory.group_of,
        settings=_runtime_settings(config, shared, core, placement.local_size),
    )
    try:
        _meet_once_more(config.start_timeout)
    except BaseException:
        _C.stop("a failure of its hvd.init()")
        _link = None
        raise
    _placement, _homogeneous = placement, homogeneous
    begin_job(placement.rank, placement.size, comm)
    _install_exit_hooks()
    try:
        register(sets, "hvd.init")
    except BaseException as error:
        _leave(f"a failure of its hvd.init() ({error})")
        raise


def _check_communicator(comm: Any, size: int) -> None:
    if comm is None:
        return
    if hasattr(comm, "Get_size"):
        if comm.Get_size() != size:
            raise ValueError(
                f"init(comm=...): the communicator has {comm.Get_size()} processes, the job has "
                f"{size} ranks; start only the ranks that should take part"
            )
        return
    if not isinstance(comm, Sequence) or isinstance(comm, (str, bytes)):
        raise ValueError(
            "init(comm=...) takes None, the list of all ranks, or an mpi4py communicator, not "
            f"{type(comm).__name__}"
        )
    if sorted(comm) != list(range(size)):
        raise ValueError(
            f"init(comm={list(comm)}) names a part of the {size} ranks: start only the ranks that "
            "should take part"
        )


def _runtime_settings(
    config: Config, shared: dict[str, Any], core: int, local_size: int
) -> _C.RuntimeSettings:
    """What the runtime is started with. `shared` are the settings that rank 0 decides."""
    report_stalls = not config.stall_check_disable
    return {
        "fusion_threshold": int(shared["fusion_threshold"]),
        "group_fusion": not shared["disable_group_fusion"],
        "average_over_active": shared["join_divisor"] == "active",
        "cycle_time": shared["cycle_time"] / 1000,
        "cache_capacity": int(shared["cache_capacity"]),
        "inline_limit": int(shared["inline_limit"]),
        "lone_inline_limit": int(shared["lone_inline_limit"]),
        "core": core,
        "spin": local_size <= len(os.sched_getaffinity(0)),
        "operation_timeout": config.operation_timeout,
        "stall_warn_after": report_stalls * config.stall_check_time_seconds,
        "stall_stop_after": report_stalls * config.stall_shutdown_time_seconds,
        "log_level": LOG_LEVELS.index(config.log_level),
        "log_hide_time": config.log_hide_time,
    }


def _meet_once_more(timeout: float) -> None:
    """A barrier: no rank leaves init() before all ranks' connections stand.

    Else a rank that dies right after its own init() would break that of the others, which could
    not tell who it was.
    """
    barrier = _C.submit(
        BARRIER, "barrier.init", "barrier", [], False, False, SUM, 1.0, 1.0, 0, None, 0
    )
    if not barrier.wait(timeout):
        raise TimeoutError(
            f"hvd.init(): not all ranks were ready within the start timeout of {timeout:g} s "
            "(HVDTORCH_START_TIMEOUT, hvdrun --start-timeout)"
        )


def _core(config: Config, local_rank: int) -> int:
    """The core for this rank's runtime threads, -1 for any."""
    if not config.thread_affinity:
        return -1
    if local_rank >= len(config.thread_affinity):
        raise ValueError(
            f"HVDTORCH_THREAD_AFFINITY lists {len(config.thread_affinity)} cores, and local rank "
            f"{local_rank} needs one of its own: list a core for each rank of this host"
        )
    return config.thread_affinity[local_rank]


def shutdown() -> None:
    """Leave the job. Pending and later collectives of the other ranks fail with
    `HorovodInternalError`. Does nothing when not initialised."""
    _leave("")


def _leave(reason: str) -> None:
    global _placement, _link
    if not _C.is_running():
        return
    for callback in _at_shutdown:
        callback()
    _C.stop(reason)
    _link = None
    _placement = None
    end_job()


def on_shutdown(callback: Callable[[], None]) -> None:
    """Have `callback()` run at the beginning of each shutdown (for modules that keep state)."""
    _at_shutdown.append(callback)


# ---- last words ----

_hooks_installed = False


def _install_exit_hooks() -> None:
    """Once per process: leave at exit, and remember the exception that ends the script."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(lambda: _leave(_last_words))
    previous = sys.excepthook

    def remember(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        global _last_words
        _last_words = _describe(kind, value, trace)
        if issubclass(kind, _C.HorovodInternalError) and _echo_fd >= 0 and _placement is not None:
            with contextlib.suppress(OSError):
                os.write(_echo_fd, b"%d\n" % _placement.rank)
        previous(kind, value, trace)

    sys.excepthook = remember


def _describe(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> str:
    """ "ValueError: bad batch (train.py:17)", one line."""
    text = "".join(traceback.format_exception_only(kind, value)).strip().splitlines()[-1]
    frames = traceback.extract_tb(trace)
    if frames:
        text += f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    return text[:500]


# ---- where am I ----


def is_initialized() -> bool:
    """True between init() and shutdown() of this process. Never raises."""
    return _placement is not None


def _here() -> Placement:
    if _placement is None:
        raise ValueError("hvdtorch is not initialized: call hvd.init() first")
    return _placement


def rank() -> int:
    """Index of this process in the job, 0 to size() - 1. ValueError before init()."""
    return _here().rank


def size() -> int:
    """Number of processes in the job. ValueError before init()."""
    return _here().size


def bucket_size() -> int:
    """Bytes of gradients to reduce together, as rank 0 has decided for the job."""
    return _bucket_size


def local_rank() -> int:
    """Index of this process among those of its host. ValueError before init()."""
    return _here().local_rank


def local_size() -> int:
    """Number of processes on this host. ValueError before init()."""
    return _here().local_size


def cross_rank() -> int:
    """Index of this host among those that have this local rank. ValueError before init()."""
    return _here().cross_rank


def cross_size() -> int:
    """Number of hosts that have this local rank. ValueError before init()."""
    return _here().cross_size


def is_homogeneous() -> bool:
    """Whether every host has as many processes as this one. ValueError before init()."""
    _here()
    return _homogeneous


# ---- what was built, what is used ----

mpi_built = buildinfo.mpi_built
gloo_built = buildinfo.gloo_built
nccl_built = buildinfo.nccl_built
ddl_built = buildinfo.ddl_built
ccl_built = buildinfo.ccl_built
cuda_built = buildinfo.cuda_built
rocm_built = buildinfo.rocm_built


def mpi_enabled() -> bool:
    """Whether MPI carries control or data in this run: never."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo carries data in this run: from init() on."""
    return is_initialized()


def mpi_threads_supported() -> bool:
    """Raises ValueError: MPI is not used."""
    raise ValueError("mpi_threads_supported() has no answer: this build does not use MPI")
