"""Process sets: which ranks take part in a collective.

Every collective takes `process_set=`; without it, all ranks of the job take part
(`global_process_set`). Further sets are registered at `hvd.init(process_sets=[...])` or at any time
by `add_process_set`. Operations of different sets have nothing to do with each other: the same name
can be in flight in two sets at once, and no set waits for another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from . import _C

# Values of OpKind in csrc/core/types.h. All share a name, so that a rank that adds a set while
# another removes one is told so.
_ALLGATHER, _ADD, _REMOVE = 1, 7, 8
_NAME = "process_sets"


class ProcessSet:
    """A set of ranks. Two objects are equal only if they are the same object.

    A copy of a registered set, also one that was pickled on another rank or in another job, is the
    registered set of the same ranks; where there is none, it is a new set that is not registered.

    Parameters
    ----------
    ranks_or_comm : iterable of int, or mpi4py.MPI.Comm
        The global ranks in the set, in any order. With a communicator, the ranks of the processes
        in it; each process passes the communicator that it belongs to, so that all parts of an
        `MPI.Comm.Split` can be registered at once.

    Attributes
    ----------
    process_set_id : int or None
        The number the job knows the set by; None while it is not registered.
    ranks : list[int] or None
        The global ranks in the set, ascending. None for the global set before `hvd.init()`, and for
        a set made from a communicator before it is registered.
    mpi_comm : mpi4py.MPI.Comm or None
        The communicator the set was made from.

    Raises
    ------
    ValueError
        A rank that is no Python int, or is given twice; a set without ranks.
    """

    process_set_id: int | None
    ranks: list[int] | None

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id = None
        self.mpi_comm = None
        if _is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            self.ranks = None
            return
        if isinstance(ranks_or_comm, ProcessSet) or not isinstance(ranks_or_comm, Iterable):
            raise TypeError(
                "ProcessSet takes a list of ranks, as in hvd.ProcessSet([0, 1]), or a "
                f"communicator, not {_shown(ranks_or_comm)}"
            )
        members = list(ranks_or_comm)
        wrong = [rank for rank in members if type(rank) is not int]
        if wrong:
            raise ValueError(f"a process set is made of ranks as Python ints, not {wrong[0]!r}")
        if not members:
            raise ValueError(
                "a process set needs at least one rank; hvd.global_process_set has all of them"
            )
        if len(set(members)) < len(members):
            raise ValueError(f"a process set has each rank once, not {members}")
        self.ranks = sorted(members)

    def size(self) -> int | None:
        """Number of ranks in the set; None if it is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """This process's rank within the set; None if the set is not registered.

        Raises ValueError if this process is not a member.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        rank = _this_rank("ProcessSet.rank")
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not a member of {self}")
        return self.ranks.index(rank)

    def included(self) -> bool | None:
        """Whether this process is a member; None for a communicator that is not registered yet.

        Raises ValueError before `hvd.init()`.
        """
        if self.ranks is None and self.mpi_comm is not None:
            return None
        rank = _this_rank("ProcessSet.included")
        return self.ranks is not None and rank in self.ranks

    def __reduce__(self) -> tuple[Any, ...]:
        # Ids and communicators mean something in one job only, ranks in all.
        if self is global_process_set:
            return _restored, (None,)
        return _restored, (self.mpi_comm if self.ranks is None else self.ranks,)

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


def _restored(ranks_or_comm: Any) -> ProcessSet:
    if ranks_or_comm is None:
        return global_process_set
    return _registered_like(ranks_or_comm) or ProcessSet(ranks_or_comm)


def _shown(value: object) -> str:
    return str(value) if isinstance(value, ProcessSet) else repr(value)


def _is_communicator(value: object) -> bool:
    return hasattr(value, "Get_size") and hasattr(value, "allgather")


def _make_global() -> ProcessSet:
    everyone = ProcessSet([0])
    everyone.process_set_id = 0
    everyone.ranks = None
    return everyone


global_process_set = _make_global()

_rank: int | None = None  # this process's global rank, while the job runs
_registered: list[ProcessSet] = []  # besides the global one


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set while the job runs.

    All ranks of the job must call it, members or not, and if they add or remove several sets, in
    the same order. Blocks until all have. Returns the object given, or a new one for ranks, with
    its `process_set_id`. Ids are not used again.

    Raises
    ------
    ValueError
        hvdtorch is not initialised; a rank that the job does not have; the set, or another one of
        the same ranks, is registered already.
    TypeError
        Neither a process set nor ranks.
    HorovodInternalError
        On all ranks, if they add or remove different sets; the text says who does what.
    """
    _this_rank("add_process_set")
    if not isinstance(process_set, ProcessSet):
        if not isinstance(process_set, Iterable) and not _is_communicator(process_set):
            raise TypeError(
                f"add_process_set: pass a hvd.ProcessSet or a list of ranks, not {process_set!r}"
            )
        process_set = ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ValueError(
            f"add_process_set: {process_set} is registered already: use it as it is, or call "
            "hvd.remove_process_set() with it first"
        )
    if process_set.mpi_comm is not None or process_set.ranks is None:
        register([process_set])
        return process_set
    _check_ranks(process_set.ranks)
    process_set.process_set_id = _agree(_ADD, process_set.ranks)
    _registered.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set from the job; True if it was there.

    All ranks of the job must call it, as for `add_process_set`. Blocks until all have. Operations
    of the set that all its ranks have submitted are still carried out, others fail with
    `HorovodInternalError`. False, at once, for the global set and for one that is not registered.

    Raises
    ------
    ValueError
        hvdtorch is not initialised.
    TypeError
        Not a process set.
    HorovodInternalError
        On all ranks, if they add or remove different sets; the text says who does what.
    """
    _this_rank("remove_process_set")
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            "remove_process_set: pass the hvd.ProcessSet that was registered, not "
            f"{process_set!r}; hvd.add_process_set() returns it"
        )
    id = process_set.process_set_id
    if not id or process_set not in _registered:
        return False
    _agree(_REMOVE, [id])
    _forget(id)
    return True


def _this_rank(what: str) -> int:
    if _rank is None:
        raise ValueError(f"{what}: hvdtorch is not initialized: call hvd.init() first")
    return _rank


def _check_ranks(ranks: list[int]) -> None:
    everyone = global_process_set.ranks or []
    if ranks[0] < 0 or ranks[-1] >= len(everyone):
        raise ValueError(f"process set {ranks}: the job has the ranks 0-{len(everyone) - 1}")
    if ranks == everyone:
        raise ValueError(f"process set {ranks}: that is hvd.global_process_set")
    if _registered_like(ranks):
        raise ValueError(
            f"process set {ranks} is registered already: use the object that was registered, or "
            "call hvd.remove_process_set() with that first"
        )


def _agree(kind: int, numbers: list[int]) -> int:
    """Add (these ranks) or remove (this id) with all ranks; returns the set's id."""
    tensor = torch.tensor(numbers)
    handle = _C.submit(kind, _NAME, _NAME, [tensor], False, False, 1, 1.0, 1.0, 0, None, 0)
    handle.wait()
    return handle.numbers()[0] if kind == _ADD else numbers[0]


# ------------------------------------------------------------------------------------------------
# Several at once, perhaps from communicators


def given_at_init(process_sets: Any) -> list[ProcessSet]:
    """The argument `process_sets` of `hvd.init()` as a list; ValueError if it cannot be one."""
    if process_sets is None or process_sets == "dynamic":
        return []
    if isinstance(process_sets, (str, ProcessSet)) or not isinstance(process_sets, Iterable):
        raise ValueError(
            f"init(process_sets={_shown(process_sets)}): pass a list of process sets; sets can "
            "be added later as well, by hvd.add_process_set()"
        )
    return [p if isinstance(p, ProcessSet) else ProcessSet(p) for p in process_sets]


def register(process_sets: list[ProcessSet], name: str = _NAME) -> None:
    """Register these sets; all ranks must call it, with the same sets in the same order.

    `name` is what a stall report calls it.

    Of a communicator, every part that the ranks hold is registered. Raises ValueError, on all
    ranks, if they differ in what they register or it cannot be registered.
    """
    rank = _this_rank("init")
    own = [p.ranks if p.mpi_comm is None else "a communicator" for p in process_sets]
    everyones = _exchange(own, name)
    for other, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            raise ValueError(
                "all ranks must register the same process sets in the same order: rank 0 has "
                f"{everyones[0]}, rank {other} has {theirs}"
            )
    for process_set in process_sets:
        if process_set.mpi_comm is None:
            add_process_set(process_set)
            continue
        # A communicator is told by its lowest rank: that makes the parts of a split known to all.
        own_leader = min(process_set.mpi_comm.allgather(rank))
        leaders = _exchange(own_leader, name)
        for leader in sorted(set(leaders)):
            ranks = [r for r, its_leader in enumerate(leaders) if its_leader == leader]
            _check_ranks(ranks)
            part = process_set if leader == own_leader else ProcessSet(ranks)
            part.process_set_id, part.ranks = _agree(_ADD, ranks), ranks
            _registered.append(part)


def _exchange(value: Any, name: str) -> list[Any]:
    """Every rank's value, which JSON can express, by rank."""
    text = json.dumps(value).encode() + b"\0"
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    handle = _C.submit(_ALLGATHER, name, name, [tensor], False, False, 1, 1.0, 1.0, 0, None, 0)
    handle.wait()
    texts = bytes(handle.outputs()[0].tolist()).split(b"\0")[:-1]
    return [json.loads(text) for text in texts]


def find_registered(process_sets: list[ProcessSet]) -> None:
    """Give these objects the ids of the registered sets of the same ranks.

    Raises ValueError if there is none.
    """
    for process_set in process_sets:
        known = _registered_like(process_set.ranks)
        if known is None:
            raise ValueError(
                f"hvdtorch is initialized already, without {process_set}: register it by "
                "hvd.add_process_set()"
            )
        if process_set not in _registered:
            process_set.process_set_id = known.process_set_id
            _registered.append(process_set)


def _registered_like(ranks: object) -> ProcessSet | None:
    return next((p for p in _registered if p.ranks == ranks), None)


def _forget(id: int | None) -> None:
    """A set has ended."""
    for process_set in [p for p in _registered if p.process_set_id == id]:
        _registered.remove(process_set)
        process_set.process_set_id = None


def begin_job(rank: int, size: int, comm: Any) -> None:
    """The job has begun, and its global process set with it; `comm` as given to `hvd.init()`."""
    global _rank
    _rank = rank
    global_process_set.ranks = list(range(size))
    global_process_set.mpi_comm = comm if _is_communicator(comm) else None


def end_job() -> None:
    """The job has ended, and its process sets with it."""
    global _rank
    _rank = global_process_set.ranks = global_process_set.mpi_comm = None
    for process_set in list(_registered):
        _forget(process_set.process_set_id)
