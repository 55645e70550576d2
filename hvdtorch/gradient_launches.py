"""Launches: the reductions of single gradients, from the moment one is ready until it is received.

A gradient is offered when it is ready, and most are launched at once. One of a bucket waits for the
rest of the bucket; a sparse one, and a bucket that stays incomplete, for the round that ends the
pass (gradient_rounds.py). What becomes of a gradient on this rank is its slot's mark.

Note [Contributions that must stay apart]
    Reducing what was reduced already is harmless for an average (the average of equal values is
    that value) and wrong for every other op. And a tensor whose reduction is in flight must not be
    added to (a parameter can fire twice in one pass: reentrant activation checkpoints). A hook
    that runs right before accumulation takes such a tensor out of `.grad`, so that the new
    contribution gets a tensor of its own. The end of the round adds that to the tensor taken out,
    and puts it back.

Note [Passes that raised]
    A backward() that raises leaves reductions in flight. If all ranks left the same ones, then the
    next pass completes them and reduces its own gradients after them. Otherwise one rank's new
    gradient would meet another one's old gradient. So every announcement says what is left of
    earlier passes, and if the ranks differ in that, the round completes everything, drops it, and
    raises the same error on all ranks.

    What the other ranks will never launch would stay in flight for ever. Hence nothing is launched
    while groups have changed and the ranks have not agreed about them yet: the first round agrees,
    and launches what the pass has made ready.

    What such a pass has made ready without launching it, since the joint bucket was incomplete,
    counts as left as well, so that ranks see the same whether or not it was launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _C
from .exceptions import HorovodInternalError
from .gradient_groups import Bucket, Group, Meeting, Slot, exchange, readable
from .operation import ALLREDUCE
from .process_sets import ProcessSet

if TYPE_CHECKING:
    from .gradient_buckets import JointBucket

# A slot's mark in the announcement. Ranks are combined by maximum, so the order matters.
CLEAN = 0  # nothing to reduce here
HELD = 1  # accumulated here, in a pass that was not due
WAITING = 2  # to be reduced, but its bucket is not complete here
LAUNCHED = 3
TWICE = 4  # launched, and accumulated once more meanwhile: a second reduction has to follow
SPARSE = 5  # to be reduced, and not dense

_submit = _C.submit


class Launches:
    """What is in flight and what is set aside, for one process set."""

    def __init__(self, process_set: ProcessSet, changed: Callable[[], None]) -> None:
        self._process_set = process_set
        self._changed = changed  # to be called when the joint buckets fit no longer
        self.joint: list[JointBucket] = []
        self.former: list[JointBucket] = []  # those before the last change
        self.positions = 0  # given to gradients as they became ready
        self.asides: list[Slot] = []  # slots whose `aside` is, or was, in use
        self.held_back = True  # nothing is launched: the ranks have yet to agree about the groups
        self._in_flight: list[Slot] = []
        # The number of a backward() that reached a slot, and what it had found from before.
        self._entered: list[tuple[int, list[Slot]]] = []
        self._dropped: dict[Slot, None] = {}  # by zero_grad(), while their bucket was incomplete

    def entered(self, task: int) -> None:
        """A backward() has reached a slot (for the first time, or after one nested in it)."""
        if self.joint and self._process_set.process_set_id != self.joint[0].process_set:
            self._changed()
        self._entered.append((task, self.unfinished()))

    def unfinished(self) -> list[Slot]:
        """What was made ready and is not reduced: Note [Passes that raised]."""
        self.adopt()
        waiting: list[Slot] = []
        for bucket in self.joint:
            if WAITING in bucket.group.marks:
                waiting += bucket.marked(WAITING)
        return [*self._in_flight, *waiting, *self._dropped]

    def left_over(self, task: int) -> list[Slot]:
        """What was unfinished before this backward() began."""
        # The engine counts upwards, so those nested in this one have higher numbers.
        found = next((left for each, left in self._entered if each >= task), None)
        self._entered.clear()
        return self.unfinished() if found is None else found

    def dropped(self, slot: Slot) -> None:
        """The user has cleared the gradient of a slot whose joint bucket was incomplete."""
        self._dropped[slot] = None

    def adopt(self) -> None:
        """Make slots of what the hooks have launched in joint buckets: for whatever is unusual."""
        for bucket in self.joint:
            if bucket.native.in_flight and not bucket.adopted:
                bucket.adopted = True
                handle, gradients = bucket.native.handle(), bucket.native.gradients()
                for slot, gradient in zip(bucket.slots, gradients, strict=True):
                    slot.handle = handle
                    slot.tensor = slot.zeros() if gradient is None else gradient
                    slot.guarded = True
                self._in_flight += bucket.slots

    def dissolve(self) -> None:
        """Let go of the joint buckets, but not of what they have in flight."""
        self.adopt()
        for bucket in self.joint:
            bucket.native.retire()
            for slot in bucket.slots:
                slot.joint = None
        if self.joint:
            self.former, self.joint = self.joint, []

    def finish_joint(self) -> Meeting[None]:
        """After a disagreement: complete on all ranks what some have launched in joint buckets.

        What is in flight alone can wait until the ranks agree, but then buckets will be others.
        Gradients that were in flight count as left over all the same.
        """
        buckets = {bucket.operation: bucket for bucket in (*self.former, *self.joint)}
        running = [name for name, bucket in buckets.items() if bucket.native.in_flight]
        texts = [str(len(running)), *running, *buckets]
        everyones = yield from exchange(texts, "hvdtorch.gradient_buckets", self._process_set)
        known = set(buckets)
        wanted: set[str] = set()
        for count, *names in everyones:
            wanted.update(names[: int(count)])
            known &= set(names[int(count) :])
        for name in sorted(wanted & known):
            bucket = buckets[name]
            if bucket.native.in_flight:
                self._dropped.update(dict.fromkeys(bucket.slots))
            else:
                bucket.native.launch_zeros()
            handle = bucket.native.handle()
            yield handle
            handle.wait()
            bucket.native.land()
            bucket.adopted = False
            for slot in bucket.slots:
                slot.settle()
        self._in_flight = [slot for slot in self._in_flight if slot.handle is not None]

    def number(self) -> int:
        """The process set's, as the core knows it. TypeError if it is not registered."""
        number = self._process_set.process_set_id
        if number is None:
            raise TypeError(
                f"a DistributedOptimizer reduces over ranks {self._process_set.ranks}, but that "
                "process set is not registered any more: register it again with "
                "hvd.add_process_set(), or let go of the optimizer before the set is removed"
            )
        return number

    def release_gradients(self) -> None:
        """Take out of `.grad` what a failed backward() has left in flight, so it can be written."""
        self.adopt()
        for slot in self._in_flight:
            parameter = slot.parameter()
            if parameter is not None and parameter.grad is slot.tensor:
                parameter.grad = None

    def abandon(self, keep: bool) -> None:
        """After a failure: nothing is set aside any more, nor in flight, unless that is kept."""
        self.adopt()
        if not keep:
            self._in_flight = []
            self._dropped = {}
            for bucket in self.joint:
                bucket.native.abandon()
                bucket.adopted = False
        self._entered = []
        self.asides = []

    def forget(self, groups: Sequence[Group]) -> None:
        """These groups are gone, with what they had in flight."""
        self.adopt()
        self._in_flight = [slot for slot in self._in_flight if slot.group not in groups]
        self.joint = [bucket for bucket in self.joint if bucket.group not in groups]

    # -- While gradients become ready

    def offer(self, slot: Slot, gradient: Tensor) -> None:
        """The slot's gradient is to be reduced: as soon as possible, which often is now."""
        if gradient.layout is not torch.strided:
            slot.group.marks[slot.index] = SPARSE
            parameter = slot.parameter()
            if parameter is not None and readable(gradient) is not gradient:
                parameter.grad = readable(gradient)
        elif self.held_back:
            slot.group.marks[slot.index] = WAITING
        elif slot.joint is not None:
            self.number()
            if not slot.joint.native.offer(slot.joint.slots.index(slot)):
                # The parameter is not what it was: the ranks arrange their buckets anew.
                slot.alone = True
                self._changed()
                slot.group.marks[slot.index] = WAITING
        elif slot.bucket is None:
            self.launch(slot, gradient)
        else:
            marks, span = slot.group.marks, slot.bucket.span
            marks[slot.index] = WAITING
            if marks.count(WAITING, span.start, span.stop) == len(slot.bucket.slots):
                self._launch_bucket(slot.bucket)

    def launch(self, slot: Slot, gradient: Tensor) -> None:
        group = slot.group
        wire = self._wire(slot, gradient) if group.converts else gradient
        number = self._process_set.process_set_id
        slot.handle = _submit(
            ALLREDUCE,
            slot.operation,
            "allreduce",
            [wire],
            False,
            True,
            *group.arithmetic,
            self.number() if number is None else number,
        )
        slot.tensor = gradient
        slot.guarded = True
        group.marks[slot.index] = LAUNCHED
        self._in_flight.append(slot)

    def launch_joint(self, bucket: JointBucket) -> None:
        """Launch a joint bucket that another rank has launched, or will, whatever is here."""
        for slot in bucket.slots:
            self.contribution(slot)
        bucket.native.launch()
        self.adopt()

    def _launch_bucket(self, bucket: Bucket) -> None:
        group = bucket.slots[0].group
        gradients = [self.contribution(slot) for slot in bucket.slots]
        wires = [self._wire(*each) for each in zip(bucket.slots, gradients, strict=True)]
        handle = _submit(
            ALLREDUCE,
            bucket.operation,
            "grouped_allreduce",
            wires,
            True,
            True,
            *group.arithmetic,
            self.number(),
        )
        for slot, gradient in zip(bucket.slots, gradients, strict=True):
            slot.handle = handle
            slot.tensor = gradient
            slot.guarded = True
            group.marks[slot.index] = LAUNCHED
        self._in_flight += bucket.slots

    def _wire(self, slot: Slot, gradient: Tensor) -> Tensor:
        """What travels for a gradient, which `_receive` turns back."""
        wire = gradient if gradient.layout is torch.strided else readable(gradient).to_dense()
        if slot.group.compressed:
            with torch.no_grad():
                wire, slot.context = slot.group.settings.compression.compress(wire.detach())
        if wire is not gradient:
            slot.wire = wire
        return wire

    def launch_held(self, group: Group) -> None:
        """Offer what earlier passes have accumulated."""
        self._offer_marked(group, HELD)

    def launch_held_back(self, group: Group) -> None:
        """The ranks have agreed: offer again what was not launched before."""
        self._offer_marked(group, WAITING)

    def _offer_marked(self, group: Group, wanted: int) -> None:
        if wanted not in group.marks:
            return
        for slot, mark in zip(group.slots, bytes(group.marks), strict=True):
            if mark == wanted and slot.handle is None:
                gradient = slot.gradient()
                if gradient is None:  # dropped by the user
                    slot.aside = None
                    group.marks[slot.index] = CLEAN
                else:
                    self.offer(slot, gradient)

    def launch_given(self, group: Group) -> None:
        """Offer the gradients that the user has put into `.grad` without a backward().

        What an earlier round has reduced and nobody has cleared since is among them if the op is
        an average, which does not change it: Note [Contributions that must stay apart].
        """
        for slot in group.slots:
            gradient = slot.gradient()
            if gradient is not None and not (slot.reduced and slot.reduced() is gradient):
                self.offer(slot, gradient)

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
        elif slot.group.marks[slot.index] != CLEAN:  # what is accumulated here is not reduced yet
            if gradient is None:
                slot.aside = None  # the user dropped the gradient, so what belonged to it as well
        elif gradient is not None:
            self._keep_aside(slot, gradient)
            parameter.grad = None

    def _keep_aside(self, slot: Slot, gradient: Tensor) -> None:
        slot.aside = gradient
        self.asides.append(slot)

    # -- In a round

    def launch_missing(self, slot: Slot) -> None:
        """Launch what other ranks launched before the round, unless this one did as well."""
        if slot.handle is not None:
            return
        if slot.joint is not None:
            self.launch_joint(slot.joint)
        elif slot.bucket is None:
            self.launch(slot, self.contribution(slot))
        else:
            self._launch_bucket(slot.bucket)

    def contribution(self, slot: Slot, sparse_dim: int | None = None) -> Tensor:
        """What to reduce for a slot that was not launched here; `.grad` becomes the result.

        Dense, unless `sparse_dim` is given or sparse gradients are reduced as dense ones.
        """
        parameter, gradient = slot.parameter(), slot.gradient()
        mark = slot.group.marks[slot.index]
        dense = sparse_dim is None and not slot.group.settings.sparse_as_dense
        if dense and gradient is not None and gradient.layout is not torch.strided:
            return slot.zeros()  # the round will refuse it; but it must end
        if mark != CLEAN and gradient is None:
            slot.aside = None  # dropped by the user
        if mark == CLEAN and gradient is not None and slot.group.separate:
            self._keep_aside(slot, gradient)
            gradient = None
        if gradient is None:
            gradient = slot.zeros(sparse_dim)
            if parameter is not None:
                parameter.grad = gradient
        return gradient

    def launch_again(self, slot: Slot) -> None:
        """The first reduction is complete; reduce what some rank accumulated meanwhile."""
        parameter, first = slot.parameter(), slot.tensor
        assert first is not None
        gradient = None if parameter is None else parameter.grad
        fired_twice = slot.group.marks[slot.index] == TWICE and gradient is not first
        if slot.aside is None:
            self._keep_aside(slot, first)
        else:
            slot.aside = _sum(slot.aside, first)
            if parameter is not None and gradient is first:
                parameter.grad = slot.aside
        if not fired_twice or gradient is None:
            gradient = slot.zeros()
        elif gradient.layout is not torch.strided:
            assert parameter is not None
            parameter.grad = gradient = readable(gradient).to_dense()
        self.launch(slot, gradient)

    def wait(self) -> Meeting[list[Slot]]:
        """Wait for all that is in flight. After a failure nothing is; the first one is raised."""
        failure: HorovodInternalError | None = None
        slots, self._in_flight = self._in_flight, []
        joint = [bucket for bucket in self.joint if bucket.native.in_flight]
        for bucket in joint:
            handle = bucket.native.handle()
            yield handle
            try:
                handle.wait()
            except HorovodInternalError as error:
                failure = failure or error
            bucket.native.land()
            bucket.adopted = False
        for slot in slots:
            assert slot.handle is not None
            yield slot.handle
            try:
                slot.handle.wait()
            except HorovodInternalError as error:
                failure = failure or error
            slot.handle = None
            if slot.wire is not None:
                if failure is None:
                    _receive(slot)
                slot.wire = slot.context = None
        self._dropped = {}
        if failure is not None:
            raise failure
        return slots

    def put_back(self) -> None:
        """Add the new reduced content to what had been set aside, and make that `.grad`."""
        if not self.asides:
            return
        still = []
        for slot in self.asides:
            parameter, aside, tensor = slot.parameter(), slot.aside, slot.tensor
            if aside is None:
                continue
            if tensor is None:  # not reduced in this round
                still.append(slot)
                continue
            slot.aside = None
            # If `.grad` is neither, the user has dropped or replaced it.
            if parameter is not None and (parameter.grad is tensor or parameter.grad is aside):
                parameter.grad = _sum(aside, tensor)
        self.asides = still


def _receive(slot: Slot) -> None:
    """Turn what travelled back into the gradient."""
    assert slot.tensor is not None and slot.wire is not None
    with torch.no_grad():
        received = slot.wire
        if slot.group.compressed:
            received = slot.group.settings.compression.decompress(received, slot.context)
        if slot.tensor.layout is not torch.strided:
            received = received.to_sparse(slot.tensor.sparse_dim())
        slot.tensor.copy_(received)


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Their sum, in the first one's memory unless it is sparse and the second one is not."""
    with torch.no_grad():
        if first.layout is not second.layout and second.layout is torch.strided:
            return second.add_(first)
        return first.add_(second)
