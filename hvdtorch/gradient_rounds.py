"""Rounds: the meeting of all ranks that completes the reductions of a backward pass.

The reducer launches gradients while they become ready (`launch`); a round (`hold`) announces, one
byte per slot, what this rank launched. Announcements are combined by their maximum. What another
rank launched and this one did not, is launched now, as zeros if nothing was accumulated here. Then
the round waits for everything. All its decisions follow from the combined announcement, hence are
the same on every rank.

Note [Contributions that must stay apart]
    Reducing what was reduced already is harmless for an average (the average of equal values is
    that value) and wrong for every other op. And a tensor whose reduction is in flight must not be
    added to (a parameter can fire twice in one pass: reentrant activation checkpoints). A hook
    that runs right before accumulation takes such a tensor out of `.grad`, so that the new
    contribution gets a tensor of its own. The end of the round adds that to the tensor taken out,
    and puts it back.
"""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from . import _C
from .exceptions import HorovodInternalError
from .gradient_groups import CHECK_BYTES, Group, Slot, check_bytes, raise_first_difference
from .operation import ALLREDUCE, MAX

# A slot's mark in the announcement. Ranks are combined by maximum, so the order matters.
CLEAN = 0  # nothing to reduce here
HELD = 1  # accumulated here, in a pass that was not due
LAUNCHED = 2
TWICE = 3  # launched, and accumulated once more meanwhile: a second reduction has to follow
REFUSED = 4  # cannot be reduced

_submit = _C.submit


class Rounds:
    """The groups of this process, what is in flight for them, and the meetings."""

    def __init__(self, process_set: int) -> None:
        self.groups: list[Group] = []
        self._process_set = process_set
        self._check: bytes | None = None  # of the groups as they are; None: to be computed
        self._in_flight: list[Slot] = []
        self._asides: list[Slot] = []  # slots whose `aside` is, or was, in use

    def slots(self) -> list[Slot]:
        return [slot for group in self.groups for slot in group.slots]

    def groups_changed(self) -> None:
        """To be called after a change of groups, their slots or settings."""
        self._check = None

    def reset(self) -> None:
        """The job has ended: forget what was in flight or accumulated, and groups out of use."""
        self._drop_unused()
        self._abandon()
        for group in self.groups:
            group.met = False

    def release_gradients(self) -> None:
        """Take out of `.grad` what a failed backward() has left in flight, so it can be written."""
        for slot in self._in_flight:
            parameter = slot.parameter()
            if parameter is not None and parameter.grad is slot.tensor:
                parameter.grad = None

    # -- While gradients become ready

    def launch(self, slot: Slot, gradient: Tensor) -> None:
        group = slot.group
        if gradient.layout is not torch.strided:
            group.marks[slot.index] = REFUSED
            return
        wire = gradient
        if group.compressed:
            with torch.no_grad():
                wire, slot.context = group.settings.compression.compress(gradient.detach())
            slot.wire = wire
        slot.handle = _submit(
            ALLREDUCE,
            slot.operation,
            "allreduce",
            [wire],
            False,
            True,
            group.settings.op,
            group.prescale,
            group.postscale,
            0,
            None,
            self._process_set,
        )
        slot.tensor = gradient
        slot.guarded = True
        group.marks[slot.index] = LAUNCHED
        self._in_flight.append(slot)

    def launch_held(self, group: Group) -> None:
        """Launch what earlier passes have accumulated."""
        if HELD not in group.marks:
            return
        for slot, mark in zip(group.slots, bytes(group.marks), strict=True):
            if mark == HELD:
                gradient = slot.gradient()
                if gradient is None:  # dropped by the user
                    slot.aside = None
                    group.marks[slot.index] = CLEAN
                else:
                    self.launch(slot, gradient)

    def launch_given(self, group: Group) -> None:
        """Launch the gradients that the user has put into `.grad` without a backward().

        What an earlier round has reduced and nobody has cleared since is among them if the op is
        an average, which does not change it: Note [Contributions that must stay apart].
        """
        for slot in group.slots:
            gradient = slot.gradient()
            if gradient is not None and not (slot.reduced and slot.reduced() is gradient):
                self.launch(slot, gradient)

    def set_aside(self, slot: Slot) -> None:
        """Note [Contributions that must stay apart]."""
        parameter = slot.parameter()
        assert parameter is not None
        gradient = parameter.grad
        if slot.handle is not None:
            if gradient is slot.tensor:
                parameter.grad = None
            elif gradient is None:
                # The user dropped it, after a backward() that raised. So its result counts as zero.
                slot.tensor = slot.zeros()
                slot.wire = slot.aside = None
        elif slot.group.marks[slot.index] == HELD:
            if gradient is None:
                slot.aside = None  # the user dropped the gradient, so what belonged to it as well
        elif gradient is not None:
            self._keep_aside(slot, gradient)
            parameter.grad = None

    def _keep_aside(self, slot: Slot, gradient: Tensor) -> None:
        slot.aside = gradient
        self._asides.append(slot)

    # -- The meeting

    def hold(self) -> None:
        """Complete what this rank and the others have launched, on all ranks.

        Raises HorovodInternalError if a reduction failed or the ranks do not reduce the same slots,
        NotImplementedError if a gradient cannot be reduced: the same on all ranks.
        """
        try:
            refused = self._reduce(*self._combine())
        except BaseException:
            self._abandon()
            raise
        if refused:
            raise NotImplementedError(
                f"sparse gradients cannot be reduced yet; on some rank the gradient of {refused} "
                "is sparse: create the embedding with sparse=False"
            )

    def _combine(self) -> tuple[list[tuple[Group, bytes]], list[Group]]:
        """Announce. The groups to reduce with the maximum of all ranks' marks; the dead groups."""
        announcement = self._announce()
        if announcement is None:
            # The ranks' groups differ. Do they still, without those that are out of use?
            self._drop_unused()
            announcement = self._announce()
        if announcement is None:
            raise_first_difference(self.slots(), self._process_set)
        due, dead, offset = [], [], CHECK_BYTES
        for group in self.groups:
            end = offset + 1 + len(group.slots)
            marks = bytes(announcement[offset + 1 : end])
            if max(marks) >= LAUNCHED:
                due.append((group, marks))
            if not announcement[offset]:
                dead.append(group)
            offset = end
        return due, dead

    def _announce(self) -> bytearray | None:
        """The maximum over ranks of their announcements; None if they are about different slots."""
        if self._check is None:
            self._check = check_bytes(self.slots())
        announcement = bytearray(self._check)
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
            self._process_set,
        )
        try:
            handle.wait()
        except HorovodInternalError:
            if _C.is_running():
                return None  # they differ in length
            raise
        return announcement if announcement.startswith(self._check) else None

    def _drop_unused(self) -> None:
        if self.groups:
            gc.collect()
            self._drop([group for group in self.groups if not group.alive])

    def _drop(self, groups: list[Group]) -> None:
        if groups:
            self.groups = [group for group in self.groups if group not in groups]
            self._check = None

    def _reduce(self, due: list[tuple[Group, bytes]], dead: list[Group]) -> str:
        """Complete all reductions of a round; returns the names of slots that cannot be reduced."""
        twice: list[Slot] = []
        refused: list[str] = []
        for group, marks in due:
            if marks == group.marks and max(marks) == LAUNCHED:
                continue  # the usual case
            for slot, anywhere, here in zip(group.slots, marks, bytes(group.marks), strict=True):
                if anywhere == REFUSED:
                    refused.append(repr(slot.name))
                elif anywhere == TWICE:
                    twice.append(slot)
                if anywhere != CLEAN and here not in (LAUNCHED, TWICE):
                    self._contribute(slot, here)
        done = self._wait()
        if twice:
            for slot in twice:
                self._contribute_again(slot)
            self._wait()
        if self._asides:
            self._put_back()
        for slot in done:
            slot.tensor = None
            slot.guarded = slot.group.separate
            if slot.guarded:
                gradient = slot.gradient()
                slot.reduced = None if gradient is None else weakref.ref(gradient)
        for group, _ in due:
            group.met = True
            group.clear_marks()
        self._drop(dead)
        return ", ".join(refused)

    def _contribute(self, slot: Slot, mark: int) -> None:
        """Some rank reduces this slot, and it was not launched here."""
        parameter = slot.parameter()
        gradient = slot.gradient()
        if gradient is not None and gradient.layout is not torch.strided:
            self.launch(slot, slot.zeros())  # the round will refuse it; but it must end
            return
        if mark == HELD and gradient is None:
            slot.aside = None  # dropped by the user
        if mark == CLEAN and gradient is not None and slot.group.separate:
            self._keep_aside(slot, gradient)
            gradient = None
        if gradient is None:
            gradient = slot.zeros()
            if parameter is not None:
                parameter.grad = gradient
        self.launch(slot, gradient)

    def _contribute_again(self, slot: Slot) -> None:
        """The first reduction is complete; reduce what some rank accumulated meanwhile."""
        parameter, first = slot.parameter(), slot.tensor
        assert first is not None
        gradient = None if parameter is None else parameter.grad
        fired_twice = slot.group.marks[slot.index] == TWICE and gradient is not first
        if slot.aside is None:
            self._keep_aside(slot, first)
        else:
            with torch.no_grad():
                slot.aside.add_(first)
            if parameter is not None and gradient is first:
                parameter.grad = slot.aside
        self.launch(slot, gradient if fired_twice and gradient is not None else slot.zeros())

    def _wait(self) -> list[Slot]:
        """Wait for all that is in flight. After a failure nothing is; the first one is raised."""
        failure: HorovodInternalError | None = None
        slots, self._in_flight = self._in_flight, []
        for slot in slots:
            try:
                slot.handle.wait()  # type: ignore[union-attr]
            except HorovodInternalError as error:
                failure = failure or error
            slot.handle = None
            if slot.wire is not None and failure is None:
                decompress = slot.group.settings.compression.decompress
                assert slot.tensor is not None
                with torch.no_grad():
                    slot.tensor.copy_(decompress(slot.wire, slot.context))
            slot.wire = slot.context = None
        if failure is not None:
            raise failure
        return slots

    def _put_back(self) -> None:
        """Add the new reduced content to what had been set aside, and make that `.grad`."""
        still = []
        for slot in self._asides:
            parameter, aside, tensor = slot.parameter(), slot.aside, slot.tensor
            if aside is None:
                continue
            if tensor is None:  # not reduced in this round
                still.append(slot)
                continue
            slot.aside = None
            # If `.grad` is neither, the user has dropped or replaced it.
            if parameter is not None and (parameter.grad is tensor or parameter.grad is aside):
                with torch.no_grad():
                    aside.add_(tensor)
                parameter.grad = aside
        self._asides = still

    def _abandon(self) -> None:
        """After a failure: nothing is accumulated, in flight or set aside any more."""
        self._in_flight = []
        self._asides = []
        for group in self.groups:
            group.fired = False
            group.clear_marks()
            for slot in group.slots:
                slot.settle()
