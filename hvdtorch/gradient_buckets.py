"""Joint buckets: gradients that are reduced together without the user having asked for it.

One operation for many gradients costs little more than one for a single gradient, and most of it is
done by the native hooks (csrc/bind/gradient_bucket.h). So dense gradients of one group and dtype
are put into buckets of about `HVDTORCH_BUCKET_SIZE` bytes, in the order in which they became ready
when they were first reduced; the first bucket is a small one, so that communication starts early.
A large gradient is alone: it needs no copy.

How gradients are put into buckets must be the same on all ranks. It follows from what the rounds
agree on, the combined marks of a pass, and from one exchange when gradients are new. Changes only
ever divide: gradients that some pass left out are parted, for good, from those that it reduced, so
a bucket never waits for what never comes, and whatever parts of a model take turns, buckets come to
rest. After a change of groups everything is arranged anew; so it is after a join, since joined
ranks take no part in rounds. The ranks compare their buckets in every announcement.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from . import _C, basics
from .gradient_groups import Group, Meeting, Slot
from .gradient_launches import CLEAN, LAUNCHED, SPARSE, TWICE, Launches
from .operation import ALLREDUCE, MIN

_submit = _C.submit

_ELSEWHERE = 1 << 31  # the position of a gradient that became ready on other ranks only
_NEVER = -1  # of one that cannot be in a bucket here, hence nowhere

_DTYPES = frozenset(
    (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
)


class JointBucket:
    """Slots of one group whose gradients are reduced in one piece."""

    __slots__ = (
        "adopted",
        "group",
        "indices",
        "native",
        "operation",
        "process_set",
        "slots",
        "strides",
    )

    def __init__(self, slots: list[Slot], strides: dict[Slot, list[int]], process_set: int) -> None:
        group = slots[0].group
        first, last, count = slots[0], slots[-1], len(slots)
        together = f"allreduce.{first.name}..{last.name} ({count} gradients)"
        self.operation = together if count > 1 else first.operation
        self.group = group
        self.slots = slots
        self.indices = [slot.index for slot in slots]
        self.strides = {slot: strides[slot] for slot in slots}
        self.process_set = process_set
        self.adopted = False  # what is in flight is known to its slots, see Launches.adopt
        self.native = _C.GradientBucket(
            hooks=group.hooks,
            members=self.indices,
            sizes=[list(slot.shape) for slot in slots],
            strides=[strides[slot] for slot in slots],
            dtype=first.dtype,
            name=self.operation,
            reduce_op=group.settings.op,
            prescale=group.prescale,
            postscale=group.postscale,
            process_set=process_set,
        )
        for slot in slots:
            slot.joint = self

    def __str__(self) -> str:
        members = ", ".join(f"{s.name!r} {self.strides[s]}" for s in self.slots)
        return f"a bucket of {members}"

    def marked(self, mark: int) -> list[Slot]:
        return [slot for slot in self.slots if self.group.marks[slot.index] == mark]

    def is_due(self, marks: bytes) -> bool:
        """Whether a round has to reduce the bucket as a whole, by the combined marks."""
        own = [marks[index] for index in self.indices]
        launched = any(LAUNCHED <= mark <= TWICE for mark in own)
        return launched or (CLEAN not in own and SPARSE not in own)


def candidates(group: Group) -> list[Slot]:
    """The slots that joint buckets are for, by what is the same on all ranks."""
    if group.converts:
        return []
    slots = [slot for slot in group.slots if slot.bucket is None and slot.dtype in _DTYPES]
    return slots if len(slots) > 1 else []


def refined(joint: list[JointBucket], group: Group, marks: bytes) -> list[JointBucket] | None:
    """The buckets after a pass with these combined marks, if it left one of the group incomplete.

    A sparse gradient is alone from now on.
    """
    after: list[JointBucket] = []
    changed = False
    for bucket in joint:
        own = [marks[index] for index in bucket.indices]
        parts: dict[bool, list[Slot]] = {}
        for slot, mark in zip(bucket.slots, own, strict=True):
            if bucket.group is group and mark == SPARSE:
                slot.alone, slot.joint = True, None
            else:
                parts.setdefault(bucket.group is group and mark != CLEAN, []).append(slot)
        if len(parts) == 1 and len(next(iter(parts.values()))) == len(bucket.slots):
            after.append(bucket)
            continue
        changed = True
        after += [JointBucket(part, bucket.strides, bucket.process_set) for part in parts.values()]
    return after if changed else None


def arrange(fresh: list[Slot], launches: Launches) -> Meeting[None]:
    """Put slots that were reduced for the first time into new buckets, on all ranks alike."""
    number = launches.number()
    order = {slot: i for i, slot in enumerate(sorted(fresh, key=lambda slot: slot.position))}
    rows = []
    for slot in fresh:
        own = _strides(slot)
        position = order[slot] if slot.position else _ELSEWHERE
        layout = zlib.crc32(str(own).encode())
        rows.append([_NEVER if own is None else position, layout, -layout])
        slot.position = 0
    agreed = torch.tensor(rows)
    handle = _submit(
        ALLREDUCE,
        "allreduce.hvdtorch.gradient_order",
        "allreduce",
        [agreed],
        False,
        True,
        MIN,
        1.0,
        1.0,
        0,
        None,
        number,
    )
    yield handle
    handle.wait()
    strides: dict[Slot, list[int]] = {}
    found: list[tuple[int, int, Slot]] = []
    for slot, (position, smallest, largest) in zip(fresh, agreed.tolist(), strict=True):
        slot.alone = position == _NEVER
        if slot.alone:
            continue
        found.append((position, -slot.index, slot))
        # Where ranks differ in layout, their gradients travel in the order of their elements.
        agree = smallest == -largest
        strides[slot] = (agree and _strides(slot)) or _contiguous(slot.shape)
    for group in {slot.group: None for slot in fresh}:
        new = [slot for *_, slot in sorted(found, key=lambda each: each[:2]) if slot.group is group]
        begun = any(bucket.group is group for bucket in launches.joint)
        for part in _parts(new, basics.bucket_size(), begun):
            launches.joint.append(JointBucket(part, strides, number))
        group.outside = [slot for slot in group.outside if slot.joint is None and not slot.alone]


def _parts(slots: list[Slot], limit: int, begun: bool) -> list[list[Slot]]:
    """The slots cut into buckets, those of one dtype after the other."""
    parts: list[list[Slot]] = []
    for dtype in dict.fromkeys(slot.dtype for slot in slots):
        part: list[Slot] = []
        size = 0
        room = limit if begun else limit // 8
        for slot in slots:
            if slot.dtype != dtype:
                continue
            bytes_ = slot.shape.numel() * dtype.itemsize
            if bytes_ >= limit:
                parts.append([slot])
                continue
            part.append(slot)
            size += bytes_
            if size >= room:
                parts.append(part)
                part, size, room = [], 0, limit
        if part:
            parts.append(part)
    return parts


def _strides(slot: Slot) -> list[int] | None:
    """The strides of the slot's gradient, as autograd makes it; None if it cannot be in a bucket.

    Those of dimensions of size 1, which mean nothing, are those of a contiguous tensor.
    """
    parameter = slot.parameter()
    if (
        parameter is None
        or slot.alone
        or not slot.group.alive
        or type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or parameter.layout is not torch.strided
        or parameter.device.type != "cpu"
        or parameter.shape != slot.shape
        or parameter.dtype != slot.dtype
        or getattr(parameter, "grad_dtype", None) not in (None, slot.dtype)
    ):
        return None
    plain = _contiguous(slot.shape)
    if parameter.numel() == 0 or parameter.is_contiguous():
        return plain
    sizes = [size for size in slot.shape if size != 1]
    pairs = zip(slot.shape, parameter.stride(), strict=True)
    strides = [stride for size, stride in pairs if size != 1]
    if not _dense(sizes, strides):
        return plain
    given = iter(strides)
    pairs = zip(slot.shape, plain, strict=True)
    return [default if size == 1 else next(given) for size, default in pairs]


def _dense(sizes: list[int], strides: list[int]) -> bool:
    """Whether elements with these strides fill their memory, without gaps and overlap."""
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous(shape: torch.Size) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
