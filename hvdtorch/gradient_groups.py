"""What the gradient reducer reduces: slots, buckets, groups, settings; and agreement about them.

Nothing here communicates but `first_difference`, which finds the text of an error.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from . import _C
from .compression import NoneCompressor
from .operation import ALLGATHER, AVERAGE, MAX, MIN, PRODUCT, SUM
from .process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from .gradient_buckets import JointBucket

_T = TypeVar("_T")

_submit = _C.submit

# Something that all ranks of a process set do together: a generator of the operations it has to
# wait for next, so that the meetings of several sets can be held at the same time.
Meeting: TypeAlias = Generator[_C.Handle, None, _T]

_OP_NAMES = {AVERAGE: "Average", SUM: "Sum", MIN: "Min", MAX: "Max", PRODUCT: "Product"}


class Settings(NamedTuple):
    """How gradients are reduced. Optimizers with equal settings can share parameters."""

    op: int
    compression: Any
    passes_per_step: int
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    def __str__(self) -> str:
        compression = getattr(self.compression, "__name__", type(self.compression).__name__)
        text = (
            f"op={_OP_NAMES[self.op]}, compression={compression}, "
            f"backward_passes_per_step={self.passes_per_step}, "
            f"gradient_predivide_factor={self.predivide}"
        )
        if self.sparse_as_dense:
            text += ", sparse_as_dense=True"
        if self.process_set is not global_process_set:
            text += f", process_set={self.process_set.ranks}"
        return text


class Slot:
    """A parameter to reduce, and where its reduction stands."""

    __slots__ = (
        "alone",
        "aside",
        "bucket",
        "context",
        "dtype",
        "group",
        "handle",
        "index",
        "joint",
        "name",
        "operation",
        "parameter",
        "position",
        "reduced",
        "shape",
        "tensor",
        "wire",
    )

    def __init__(self, group: Group, index: int, name: str, parameter: Tensor) -> None:
        self.group = group
        self.bucket: Bucket | None = None
        self.joint: JointBucket | None = None  # see gradient_buckets.py
        self.alone = False  # never to be in a joint bucket
        self.position = 0  # in the order in which gradients became ready
        self.index = index  # in group.slots and group.marks
        self.name = name
        self.operation = f"allreduce.{name}"
        self.parameter = weakref.ref(parameter)  # its hooks refer to this slot
        self.shape = parameter.shape
        self.dtype = parameter.dtype
        self.handle: _C.Handle | None = None  # the reduction in flight
        self.tensor: Tensor | None = None  # the gradient it reduces, until the end of the round
        self.wire: Tensor | None = None  # what travels, if compressed
        self.context: Any = None  # what the compressor needs to decompress it
        self.aside: Tensor | None = (
            None  # reduced content that a new contribution must not be added to
        )
        # What the last round left in `.grad`; kept for ops that must not be applied to it again.
        self.reduced: Callable[[], Tensor | None] | None = None

    def __str__(self) -> str:
        bucket = "" if self.bucket is None else f" in group {self.bucket.number} of groups="
        return f"{self.name!r} {list(self.shape)} {self.dtype}{bucket} ({self.group.settings})"

    @property
    def guarded(self) -> bool:
        """Whether `.grad` holds what a new contribution must not be added to."""
        return bool(self.group.guards[self.index])

    @guarded.setter
    def guarded(self, value: bool) -> None:
        self.group.guards[self.index] = value

    def gradient(self) -> Tensor | None:
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    def zeros(self, sparse_dim: int | None = None) -> Tensor:
        """A gradient of zeros, of the dtype autograd would give it; with `sparse_dim` a COO one."""
        parameter = self.parameter()
        dtype = getattr(parameter, "grad_dtype", None) or self.dtype
        if sparse_dim is not None:
            indices = torch.empty((sparse_dim, 0), dtype=torch.int64)
            values = torch.empty((0, *self.shape[sparse_dim:]), dtype=dtype)
            return coo(indices, values, self.shape, coalesced=True)
        if parameter is None:  # the model is gone here, but not yet on all ranks
            return torch.zeros(self.shape, dtype=dtype)
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    def settle(self) -> None:
        """Let go of everything but the parameter; nothing of this slot is in flight."""
        self.handle = self.tensor = self.wire = self.context = self.aside = None
        self.guarded = False


def coo(
    indices: Tensor, values: Tensor, shape: torch.Size, coalesced: bool | None = None
) -> Tensor:
    """A sparse tensor of entries that are known to be valid, so that torch need not warn."""
    if 0 in values.stride():  # torch reads such values as zeros when it makes them dense
        values = values.clone(memory_format=torch.contiguous_format)
    return torch.sparse_coo_tensor(
        indices, values, shape, check_invariants=False, is_coalesced=coalesced
    )


def readable(gradient: Tensor) -> Tensor:
    """The gradient itself, or one equal to it that torch can make dense; see `coo`."""
    if gradient.layout is not torch.sparse_coo or 0 not in gradient._values().stride():
        return gradient
    indices, values = gradient._indices(), gradient._values()
    return coo(indices, values, gradient.shape, coalesced=gradient.is_coalesced())


class Bucket:
    """Slots whose gradients travel together, as one grouped allreduce (`groups=`)."""

    __slots__ = ("number", "operation", "slots", "span")

    def __init__(self, number: int, slots: list[Slot]) -> None:
        self.number = number
        self.slots = slots
        self.span = slice(slots[0].index, slots[-1].index + 1)  # theirs, of group.slots and marks
        self.operation = f"grouped_allreduce.{slots[0].name}"
        for slot in slots:
            slot.bucket = self


class Lease:
    """Held by every optimizer that uses a group; with the last one go the group's hooks."""

    __slots__ = ("__weakref__",)


class Group:
    """Slots with common settings, counted and announced together."""

    def __init__(self, owner: str, settings: Settings) -> None:
        self.owner = owner  # for error texts
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] = []
        self.marks = bytearray()  # what this rank announces, one byte per slot
        self.guards = bytearray()  # see Slot.guarded
        self.hooks = _C.GradientHooks(self)
        self.outside: list[Slot] = []  # of no joint bucket yet
        self.passes = 0  # since the last reduction
        self.met = False  # a round has covered this group since the last step()
        self._lease: Callable[[], Lease | None] = lambda: None
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        self.settings = settings
        # Derived here, for the hooks.
        self.passes_per_step = settings.passes_per_step
        self.separate = settings.op != AVERAGE
        self.compressed = settings.compression is not NoneCompressor
        self.converts = self.compressed or settings.sparse_as_dense
        self.prescale = 1.0 / settings.predivide
        self.postscale = settings.predivide
        # Arguments of submit(), from `reduce_op` to `splits`.
        self.arithmetic = (settings.op, self.prescale, self.postscale, 0, None)

    def add(self, name: str, parameter: Tensor) -> Slot:
        slot = Slot(self, len(self.slots), name, parameter)
        self.slots.append(slot)
        self.hooks.add(parameter, parameter.is_floating_point() or parameter.is_complex())
        self.marks, self.guards = self.marks + b"\0", self.guards + b"\0"
        self.hooks.set_marks(self.marks, self.guards)
        return slot

    @property
    def alive(self) -> bool:
        return self._lease() is not None

    def lease(self) -> Lease:
        lease = self._lease()
        if lease is None:
            lease = Lease()
            self._lease = weakref.ref(lease)
            weakref.finalize(lease, self.hooks.release).atexit = False
        return lease

    def clear_marks(self) -> None:
        self.marks[:] = bytes(len(self.slots))  # in place: the hooks share them
        self.passes = 0


# ------------------------------------------------------------------------------------------------
# Agreement. Every announcement starts with `check_bytes` of two things; see `Rounds`.

_DIGEST_BYTES = 8
CHECK_BYTES = 2 * _DIGEST_BYTES


def check_bytes(texts: Sequence[str]) -> bytes:
    """A digest of the texts, and its complement: a maximum over ranks changes one if they differ.

    (A rank that takes part with zeros changes nothing.)
    """
    text = "\n".join(texts)
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
    return digest + bytes(255 - byte for byte in digest)


def gather(name: str, tensor: Tensor, process_set: int) -> _C.Handle:
    """Start an allgather of the reducer's own, among the ranks of that number of a process set."""
    return _submit(
        ALLGATHER,
        f"allgather.{name}",
        "allgather",
        [tensor],
        False,
        False,
        SUM,
        1.0,
        1.0,
        0,
        None,
        process_set,
    )


def exchange(texts: Sequence[str], name: str, process_set: ProcessSet) -> Meeting[list[list[str]]]:
    """What every rank that takes part has to say, in the order of ranks."""
    own = bytearray(json.dumps(texts).encode() + b"\0")
    handle = gather(name, torch.frombuffer(own, dtype=torch.uint8), process_set.process_set_id or 0)
    yield handle
    handle.wait()
    everyones = handle.outputs()[0].numpy().tobytes().split(b"\0")[:-1]
    return [json.loads(each) for each in everyones]


def first_difference(texts: Sequence[str], process_set: ProcessSet) -> Meeting[str]:
    """Called on all ranks of the set, when they do not agree: says what differs first, the same on
    all of them."""
    rank = str((process_set.ranks or [])[process_set.rank() or 0])
    everyones = yield from exchange([rank, *texts], "hvdtorch.gradient_layout", process_set)
    (first, *mine), *others = everyones
    for rank, *theirs in others:
        for index in range(max(len(mine), len(theirs))):
            here, there = (
                texts[index] if index < len(texts) else "nothing" for texts in (mine, theirs)
            )
            if here != there:
                return (
                    f"the ranks disagree about the gradients to reduce: number {index} is {here} "
                    f"on rank {first}, but {there} on rank {rank}. Wrap the same parameters on all "
                    "ranks, with the same names and settings and in the same order."
                )
    return "the announcement of a backward pass failed, although all ranks agree"


def abandoned_passes(here: bool, process_set: ProcessSet) -> Meeting[str]:
    """Called on all ranks of the set, when not all of them have abandoned the same reductions: says
    which have abandoned any, the same on all of them."""
    own = (process_set.ranks or [0])[process_set.rank() or 0]
    handle = gather(
        "hvdtorch.abandoned_passes",
        torch.tensor([own] if here else [], dtype=torch.int64),
        process_set.process_set_id or 0,
    )
    yield handle
    handle.wait()
    ranks = handle.outputs()[0].tolist()
    return (
        f"an earlier backward() raised on rank{'s' if len(ranks) > 1 else ''} "
        f"{', '.join(map(str, ranks))} while the other ranks went on, so the ranks are not in the "
        "same pass, and its gradients were dropped: .grad is None now. Let all ranks skip the same "
        "passes."
    )
