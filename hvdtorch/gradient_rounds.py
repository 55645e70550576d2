"""Rounds: the meeting of all ranks that completes the reductions of a backward pass.

While gradients become ready most are launched at once (gradient_launches.py). A round announces,
one byte per slot, what became of them on this rank. Announcements are combined by their maximum.
What another rank launched and this one did not, is launched now, as zeros if nothing was
accumulated here. Then the round waits for everything. All its decisions follow from the combined
announcement, hence are the same on every rank.

Two kinds of gradient are not launched when they are offered. One of a bucket waits for the rest of
the bucket. If the bucket is complete on no rank, the round launches those of its gradients that
some rank has, one by one; else it launches the whole bucket where that has not happened. (So it is
with joint buckets, but those that are complete if all ranks are taken together.) A sparse
gradient waits for the round, in which the ranks exchange what they have: see gradient_sparse.py.

After a change of groups no gradient is launched before the ranks have agreed about them; a round in
which any rank has held gradients back announces twice.
"""

from __future__ import annotations

import functools
import gc
import queue
import weakref
from collections.abc import Iterable, Sequence

import torch

from . import _C
from .exceptions import HorovodInternalError
from .gradient_buckets import arrange, candidates, refined
from .gradient_groups import (
    CHECK_BYTES,
    Group,
    Meeting,
    Slot,
    abandoned_passes,
    check_bytes,
    first_difference,
)
from .gradient_launches import CLEAN, LAUNCHED, SPARSE, TWICE, WAITING, Launches
from .gradient_sparse import Layout, SparseReduction, complete, exchange, layout_of
from .operation import ALLREDUCE, MAX
from .process_sets import ProcessSet

_submit = _C.submit

_NOTHING_LEFT = check_bytes([])
_HEADER = CHECK_BYTES + len(_NOTHING_LEFT) + 1


class Rounds:
    """The groups of one process set, and the set's meetings."""

    def __init__(self, process_set: ProcessSet) -> None:
        self.groups: list[Group] = []
        self.names: set[str] = set()  # of slots, ever used since init()
        self.launches = Launches(process_set, self.groups_changed)
        self._process_set = process_set
        self._check: bytes | None = None  # of the groups as they are; None: to be computed

    def slots(self) -> list[Slot]:
        return [slot for group in self.groups for slot in group.slots]

    def groups_changed(self) -> None:
        """To be called after a change of groups, their slots or settings."""
        self._check = None
        self.launches.held_back = True
        self.launches.dissolve()
        for group in self.groups:
            group.hooks.close()
            group.outside = candidates(group)

    def reset(self) -> None:
        """The job has ended: forget what was in flight or accumulated, and groups out of use."""
        self._drop_unused()
        self._abandon()
        self.groups_changed()
        self.names = {slot.name for slot in self.slots()}
        for group in self.groups:
            group.met = False

    def meeting(self, left: list[Slot]) -> Meeting[None]:
        """Complete what this rank and the others have launched, on all ranks.

        `left` is what is in flight of earlier passes: Note [Passes that raised].

        Raises HorovodInternalError if a reduction failed or the ranks do not reduce the same slots,
        ValueError if a gradient cannot be reduced: the same on all ranks. TypeError if the process
        set is gone.
        """
        try:
            due, dead, in_step = yield from self._combine(left)
            yield from self._reduce(due)
            self._drop(dead)
            if not in_step:
                _drop_gradients(due)
                text = yield from abandoned_passes(bool(left), self._process_set)
                raise HorovodInternalError(text)
            yield from self._arrange(due)
        except BaseException:
            # If the ranks disagree, what was launched here may be launched elsewhere never.
            self._abandon(keep=self.launches.held_back)
            raise

    def _combine(
        self, left: list[Slot]
    ) -> Meeting[tuple[list[tuple[Group, bytes]], list[Group], bool]]:
        """Announce. The groups to reduce with the maximum of all ranks' marks; the dead groups;
        whether all ranks have the same left over."""
        announcement = yield from self._announce(left)
        if announcement is None:
            # The ranks' groups differ. Do they still, without those that are out of use?
            self._drop_unused()
            left = [slot for slot in left if slot.group in self.groups]
            announcement = yield from self._announce(left)
        if announcement is not None and announcement[_HEADER - 1]:  # held back on some rank
            self.launches.held_back = False
            for group in self.groups:
                self.launches.launch_held_back(group)
            announcement = yield from self._announce(left)
        if announcement is None:
            text = yield from first_difference(self._texts(), self._process_set)
            yield from self.launches.finish_joint()
            self.groups_changed()
            raise HorovodInternalError(text)
        due, dead, offset = [], [], _HEADER
        for group in self.groups:
            end = offset + 1 + len(group.slots)
            marks = bytes(announcement[offset + 1 : end])
            if max(marks) >= WAITING:
                due.append((group, marks))
            if not announcement[offset]:
                dead.append(group)
            offset = end
        return due, dead, announcement.startswith(_left_bytes(left), CHECK_BYTES)

    def _texts(self) -> list[str]:
        """What the ranks have to agree on."""
        return [*map(str, self.slots()), *map(str, self.launches.joint)]

    def _announce(self, left: list[Slot]) -> Meeting[bytearray | None]:
        """The maximum over ranks of their announcements; None if they are about different slots."""
        if self._check is None:
            self._check = check_bytes(self._texts())
        announcement = bytearray(self._check)
        announcement += _left_bytes(left)
        announcement.append(self.launches.held_back)
        for group in self.groups:
            announcement.append(group.alive)
            announcement += group.marks
        handle = _submit(
            ALLREDUCE,
            "allreduce.hvdtorch.gradient_round",
            "allreduce",
            [torch.frombuffer(announcement, dtype=torch.uint8)],
            False,
            True,
            MAX,
            1.0,
            1.0,
            0,
            None,
            self.launches.number(),
        )
        yield handle
        try:
            handle.wait()
        except HorovodInternalError:
            if _C.is_running():
                return None  # they differ in length
            raise
        return announcement if announcement.startswith(self._check) else None

    def _reduce(self, due: list[tuple[Group, bytes]]) -> Meeting[None]:
        """Complete all reductions of a round."""
        launches = self.launches
        unusual = [(group, marks) for group, marks in due if not _all_launched(group, marks)]
        if unusual or any(group.separate for group, _ in due):
            launches.adopt()
        sparse = _marked(unusual, SPARSE)
        twice = _marked(unusual, TWICE)
        layouts = [self._layout(slot) for slot in sparse]
        for group, marks in unusual:
            self._join_in(group, marks)
        refusals: list[Exception] = []
        reductions: list[SparseReduction] = []
        if sparse:
            everyones, share = yield from exchange(layouts, self._process_set)
            for slot, ranks in zip(sparse, everyones, strict=True):
                refusal = ranks.refusal(slot)
                if refusal is not None:
                    refusals.append(refusal)
                if ranks.in_flight:  # dense there, so it has to be completed as such
                    launches.launch_missing(slot)
                    if ranks.in_flight > 1:
                        twice.append(slot)
                elif refusal is None:
                    gradient = launches.contribution(slot, ranks.sparse_dim)
                    if slot.group.settings.sparse_as_dense:
                        launches.launch(slot, gradient)
                    else:
                        slot.tensor = gradient
                        reductions.append(SparseReduction(slot, gradient, launches.number()))
        done = yield from launches.wait()
        if reductions:
            yield from complete(reductions, share, len(everyones[0]))
        if twice:
            for slot in twice:
                launches.launch_again(slot)
            yield from launches.wait()
        done += (reduction.slot for reduction in reductions)
        launches.put_back()
        for slot in done:
            slot.tensor = None
            slot.guarded = slot.group.separate
            if slot.guarded:
                result = slot.gradient()
                slot.reduced = None if result is None else weakref.ref(result)
        for group, _ in due:
            group.met = True
            group.clear_marks()
        if refusals:
            raise refusals[0]

    def _layout(self, slot: Slot) -> Layout:
        ranks = self._process_set.ranks or [0]
        mark = slot.group.marks[slot.index]
        in_flight = 0 if slot.handle is None else 2 if mark == TWICE else 1
        return layout_of(slot, in_flight, mark != CLEAN, ranks[self._process_set.rank() or 0])

    def _join_in(self, group: Group, marks: bytes) -> None:
        """Launch what other ranks have launched, or will, and this one has not.

        What is sparse on some rank is left out, unless it is in a bucket that was launched.
        """
        for bucket in group.buckets:
            if any(LAUNCHED <= mark <= TWICE for mark in marks[bucket.span]):
                self.launches.launch_missing(bucket.slots[0])
        for joint in self.launches.joint:
            if joint.group is group and not joint.native.in_flight and joint.is_due(marks):
                self.launches.launch_joint(joint)
        for slot, mark in zip(group.slots, marks, strict=True):
            if mark not in (CLEAN, SPARSE) and slot.handle is None:
                self.launches.launch(slot, self.launches.contribution(slot))

    def _arrange(self, due: list[tuple[Group, bytes]]) -> Meeting[None]:
        """Change the joint buckets as this round's marks ask for; see gradient_buckets.py."""
        fresh: list[Slot] = []
        for group, marks in due:
            if group not in self.groups:
                continue
            if SPARSE in marks or WAITING in marks:
                joint = refined(self.launches.joint, group, marks)
                if joint is not None:
                    self.launches.joint, self._check = joint, None
            if group.outside:
                fresh += [s for s in group.outside if WAITING <= marks[s.index] <= TWICE]
        if fresh:
            yield from arrange(fresh, self.launches)
            self.launches.former, self._check = [], None

    def _drop_unused(self) -> None:
        if self.groups:
            gc.collect()
            self._drop([group for group in self.groups if not group.alive])

    def _drop(self, groups: list[Group]) -> None:
        if groups:
            self.groups = [group for group in self.groups if group not in groups]
            self.launches.forget(groups)
            self._check = None

    def _abandon(self, keep: bool = False) -> None:
        """After a failure: nothing is accumulated or set aside any more, nor, unless it is to be
        kept for the next round to complete, in flight."""
        self.launches.abandon(keep)
        for group in self.groups:
            group.hooks.fired = False
            group.clear_marks()
            for slot in group.slots:
                if keep and slot.handle is not None:
                    group.marks[slot.index] = LAUNCHED
                    slot.aside = None
                else:
                    slot.settle()


def _left_bytes(left: list[Slot]) -> bytes:
    """What an announcement says of reductions that earlier passes have left in flight."""
    return check_bytes(sorted(slot.name for slot in left)) if left else _NOTHING_LEFT


def _drop_gradients(due: Iterable[tuple[Group, bytes]]) -> None:
    for group, marks in due:
        for slot, mark in zip(group.slots, marks, strict=True):
            parameter = slot.parameter()
            if mark != CLEAN and parameter is not None:
                parameter.grad = None


def _all_launched(group: Group, marks: bytes) -> bool:
    """The usual case: what any rank reduces was launched here, once."""
    return marks == group.marks and max(marks) == LAUNCHED and WAITING not in marks


def _marked(due: Iterable[tuple[Group, bytes]], wanted: int) -> list[Slot]:
    return [
        slot
        for group, marks in due
        for slot, mark in zip(group.slots, marks, strict=True)
        if mark == wanted
    ]


def hold(rounds: Sequence[tuple[Rounds, list[Slot]]]) -> None:
    """Hold a round in each of these process sets, at the same time; see `Rounds.meeting`.

    Their meetings must not wait for one another: ranks may have reached different sets in a pass,
    and a rank that is not needed in one set's meeting until later may be needed in another's now.
    So all are announced before any is waited for, and whichever can go on does. After a failure
    in one set the others are completed all the same; the first failure is raised.
    """
    if len(rounds) == 1:
        for _ in rounds[0][0].meeting(rounds[0][1]):
            pass  # it waits by itself
        return
    meetings = [each.meeting(left) for each, left in rounds]
    ready: queue.SimpleQueue[Meeting[None]] = queue.SimpleQueue()
    for meeting in meetings:
        ready.put(meeting)
    failures: list[Exception] = []
    left = len(meetings)
    try:
        while left:
            meeting = ready.get()
            try:
                awaited = next(meeting)
            except StopIteration:
                left -= 1
            except Exception as error:
                failures.append(error)
                left -= 1
            else:
                awaited.add_done_callback(functools.partial(ready.put, meeting))
    finally:
        for meeting in meetings:
            meeting.close()
    if failures:
        raise failures[0]
