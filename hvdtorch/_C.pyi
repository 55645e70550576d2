"""The typed contract between the Python API and the native core (csrc/bind)."""

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor

BUILD_TORCH_VERSION: str  # torch.__version__ this module was compiled against
BUILD_WITH_CUDA: bool  # whether the CUDA source list was compiled in

class HorovodInternalError(RuntimeError):
    """A failure that every rank of the job is told about."""

class Handle:
    """One submitted operation (all members, if it is a group)."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block without the GIL until the operation is complete; Python signal handlers run.

        Returns False if `timeout` seconds passed first. Raises HorovodInternalError if it failed.
        """
    def done(self) -> bool:
        """True once wait() would not block (also after a failure)."""
    def error(self) -> str | None:
        """The failure's text, or None."""
    def outputs(self) -> list[Tensor]:
        """Results in input order; call after wait(). In-place: the very tensors given."""
    def numbers(self, member: int = 0) -> list[int]:
        """allgather and alltoall: rows from each rank; join: [last rank]; add_process_set: [id].

        Valid after wait(). `member`: of a group, from 0.
        """
    def add_done_callback(self, callback: object) -> None:
        """callback() is called once, with the GIL, when complete (at once if it already is)."""

# OpKind and ReduceOp values are those of csrc/core/types.h.
def submit(
    # 0 allreduce 1 allgather 2 broadcast 3 alltoall 4 reducescatter 5 barrier 6 join
    # 7 add_process_set (an int64 tensor of ranks) 8 remove_process_set (one of the id)
    kind: int,
    name: str,  # full name without member suffix, "allreduce.x"; "" = unnamed: "<label>.noname.<n>"
    label: str,  # what unnamed operations are numbered under: "allreduce", "grouped_allreduce", ...
    tensors: list[Tensor],  # one tensor, or the members of a group
    grouped: bool,  # member i of n is named "<name>_<i>of<n>"
    in_place: bool,  # results go into `tensors`; else new tensors
    reduce_op: int,
    prescale: float,
    postscale: float,
    root: int,  # broadcast: rank within the process set
    splits: list[int] | None,  # alltoall
    process_set: int,  # id, 0 = global
    wait: bool = False,  # for its end, as Handle.wait(): the thread can then do more of the work
) -> Handle:
    """Submit one operation. Raises ValueError for what this rank alone can see is wrong (duplicate
    name in flight, unsupported dtype or device, ...), HorovodInternalError when the job is down."""

class GradientHooks:
    """What runs around the accumulation into `.grad` of one group's parameters."""

    fired: bool  # a gradient was accumulated in the current pass
    def __init__(self, group: object) -> None:
        """`group` is handed to the callbacks of on_gradient(); it is not kept alive."""
    def add(self, parameter: Tensor, hooked: bool) -> None:
        """One more parameter. `hooked`: it can have a gradient."""
    def set_marks(self, marks: bytearray, guards: bytearray) -> None:
        """Where marks and guards are, a byte for each parameter; their size is fixed from now."""
    def open(self, task: int, reduces: bool) -> None:
        """In this backward(), gradients of buckets are reduced; or all are only accumulated."""
    def close(self) -> None:
        """Python decides about every gradient, until open()."""
    def refresh(self) -> bool:
        """Hook what was converted to another type since. Whether there was any."""
    def release(self) -> None:
        """Remove the hooks and let go of the parameters."""

def on_gradient(before: Callable[[Any, int], None], after: Callable[[Any, int], None]) -> None:
    """What is called, with group and index, for what the hooks do not deal with themselves."""

def end_of_pass() -> None:
    """The backward() of this thread has ended: its tensors are no gradients any more."""

def forget_gradient_memory() -> None:
    """The job has ended: what its large gradients were in is not used again."""

class GradientBucket:
    """Gradients that are reduced by one operation, in one piece of memory."""

    in_flight: bool
    launches: int  # so far
    def __init__(
        self,
        hooks: GradientHooks,
        members: list[int],  # indices of the group's parameters
        sizes: list[list[int]],
        strides: list[list[int]],  # dense; the same on all ranks
        dtype: torch.dtype,
        name: str,  # of the operation
        reduce_op: int,
        prescale: float,
        postscale: float,
        process_set: int,
    ) -> None: ...
    def offer(self, member: int) -> bool:
        """The member's `.grad` is ready; the last one launches. False: it does not fit."""
    def launch(self) -> None:
        """Reduce what is in `.grad` of the members, and zeros for what is not there."""
    def launch_zeros(self) -> None:
        """Take part with zeros, and touch no gradient."""
    def retire(self) -> None:
        """No gradient is for this bucket any more."""
    def handle(self) -> Handle:
        """The operation in flight."""
    def gradients(self) -> list[Tensor | None]:
        """What it reduces; None where it was given zeros."""
    def land(self) -> None:
        """It is complete: let go of it."""
    def abandon(self) -> None:
        """It may never be: let go of it, and leave it its memory."""

class RuntimeSettings(TypedDict):
    fusion_threshold: int  # bytes; 0 = no fusion
    group_fusion: bool  # False: a group is fused with nothing but itself
    average_over_active: bool  # False: an average divides by the joined ranks too
    cycle_time: float  # seconds: how long a ready tensor may wait for company
    cache_capacity: int  # names remembered, so that they travel once
    inline_limit: int  # bytes: up to here a reduction travels inside the log
    lone_inline_limit: int  # the same for one that has nothing beside it
    core: int  # core of the runtime's threads, -1 = any
    spin: bool  # a wait may begin with spinning: each rank of this host has a core of its own
    operation_timeout: float  # seconds without progress; 0 = for ever
    stall_warn_after: float  # seconds; 0 = never
    stall_stop_after: float  # seconds; 0 = never
    log_level: int  # 0 trace ... 5 fatal, for lines of the core
    log_hide_time: bool

class HostGroup:
    """The ranks of one host, and the memory they share."""

    @staticmethod
    def create(size: int) -> HostGroup:
        """Make the memory; this rank is number 0 of `size`. RuntimeError if it cannot be."""
    @staticmethod
    def open(index: int, size: int, pid: int, fd: int, nonce: int) -> HostGroup:
        """Map it as number `index`. RuntimeError if it cannot be."""
    def address(self) -> tuple[int, int, int]:
        """What the others open it by: pid, fd and nonce."""

def start(
    rank: int,
    size: int,
    hosts: list[str],  # host name of every rank, for error texts
    fds: list[int],  # authenticated control sockets; rank 0: by rank (-1 at 0), others: [rank 0's]
    link: object,  # torch.distributed ProcessGroupGloo over all ranks; None if all share memory
    group: HostGroup | None,  # the ranks this one shares memory with; None: it is alone
    group_of: list[int],  # by rank: the number of its group
    settings: RuntimeSettings,
) -> None: ...
def shared_empty(shape: list[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor that the other ranks of this host can work on where it is."""

def renumber_unnamed() -> None:
    """After a join: unnamed operations get the same names on all ranks again."""

def excuse(seconds: float) -> None:
    """For so long this rank may submit nothing without being reported; 0: it is back."""

def stop(reason: str) -> None:
    """Leave the job; idempotent. The other ranks are told `reason` ("" = plain shutdown)."""

def is_running() -> bool: ...
def runtime_threads() -> list[int]:
    """Kernel thread ids of the runtime's threads (tests read their context-switch counters)."""

def stats() -> dict[str, int]:
    """Counters since start: operations, launches and tensors in them, control frames and bytes."""
