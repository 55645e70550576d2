"""Process sets: which ranks take part in a collective.

Every collective takes `process_set=`; without it, all ranks of the job take part
(`global_process_set`). `hvd.init()` fills the global set in, `hvd.shutdown()` empties it.
"""

from __future__ import annotations

from collections.abc import Iterable


class ProcessSet:
    """A set of ranks. Two objects are equal only if they are the same object.

    Attributes
    ----------
    process_set_id : int or None
        The number the job knows the set by; None until it is registered.
    ranks : list[int] or None
        The global ranks in the set, ascending; None for the global set before `hvd.init()`.
    mpi_comm : None
        Always None here; kept because scripts print it.
    """

    process_set_id: int | None
    ranks: list[int] | None

    def __init__(self, ranks: Iterable[int]) -> None:
        members = list(ranks)
        wrong = [rank for rank in members if type(rank) is not int]
        if wrong:
            raise ValueError(f"a process set is made of ranks as Python ints, not {wrong[0]!r}")
        self.process_set_id = None
        self.ranks = sorted(members)
        self.mpi_comm = None
        self._rank: int | None = None  # this process's global rank, once known

    def _bind(self, rank: int, size: int) -> None:
        """The global set of a job of `size` ranks, seen from `rank`."""
        self.ranks = list(range(size))
        self._rank = rank

    def _unbind(self) -> None:
        self.ranks = None
        self._rank = None

    def size(self) -> int | None:
        """Number of ranks in the set; None if it is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """This process's rank within the set; None if the set is not registered.

        Raises ValueError if this process is not a member.
        """
        if self.process_set_id is None or self.ranks is None or self._rank is None:
            return None
        if self._rank not in self.ranks:
            raise ValueError(f"rank {self._rank} is not a member of {self}")
        return self.ranks.index(self._rank)

    def included(self) -> bool:
        """Whether this process is a member."""
        return self.ranks is not None and self._rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


def _make_global() -> ProcessSet:
    everyone = ProcessSet([])
    everyone.process_set_id = 0
    everyone._unbind()
    return everyone


global_process_set = _make_global()
