"""What the gradient reducer reduces: slots, groups, settings; and whether all ranks mean the same.

Nothing here communicates but `raise_first_difference`, which ends in an error.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from . import _C
from .compression import NoneCompressor
from .exceptions import HorovodInternalError
from .operation import ALLGATHER, AVERAGE, SUM


class Settings(NamedTuple):
    """How gradients are reduced. Optimizers with equal settings can share parameters."""

    op: int
    compression: Any
    passes_per_step: int
    predivide: float

    def __str__(self) -> str:
        op = {AVERAGE: "Average", SUM: "Sum"}.get(self.op, str(self.op))
        compression = getattr(self.compression, "__name__", type(self.compression).__name__)
        return (
            f"op={op}, compression={compression}, backward_passes_per_step={self.passes_per_step}, "
            f"gradient_predivide_factor={self.predivide}"
        )


class Slot:
    """A parameter to reduce, and where its reduction stands."""

    __slots__ = (
        "aside",
        "context",
        "dtype",
        "group",
        "guarded",
        "handle",
        "hooks",
        "index",
        "name",
        "operation",
        "parameter",
        "reduced",
        "shape",
        "tensor",
        "wire",
    )

    def __init__(self, group: Group, index: int, name: str, parameter: Tensor) -> None:
        self.group = group
        self.index = index  # in group.slots and group.marks
        self.name = name
        self.operation = f"allreduce.{name}"
        self.parameter = weakref.ref(parameter)  # its hooks refer to this slot
        self.shape = parameter.shape
        self.dtype = parameter.dtype
        self.hooks: list[RemovableHandle] = []
        self.handle: _C.Handle | None = None  # the reduction in flight
        self.tensor: Tensor | None = None  # the gradient it reduces, until the end of the round
        self.wire: Tensor | None = None  # what travels, if compressed
        self.context: Any = None  # what the compressor needs to decompress it
        self.aside: Tensor | None = (
            None  # reduced content that a new contribution must not be added to
        )
        self.guarded = False  # whether the hook before accumulation has to look closer
        # What the last round left in `.grad`; kept for ops that must not be applied to it again.
        self.reduced: Callable[[], Tensor | None] | None = None

    def __str__(self) -> str:
        return f"{self.name!r} {list(self.shape)} {self.dtype} ({self.group.settings})"

    def gradient(self) -> Tensor | None:
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    def zeros(self) -> Tensor:
        """A gradient of zeros, of the dtype autograd would give it."""
        parameter = self.parameter()
        if parameter is None:  # the model is gone here, but not yet on all ranks
            return torch.zeros(self.shape, dtype=self.dtype)
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    def settle(self) -> None:
        """Let go of everything but the parameter; nothing of this slot is in flight."""
        self.handle = self.tensor = self.wire = self.context = self.aside = None
        self.guarded = False


class Lease:
    """Held by every optimizer that uses a group; with the last one go the group's hooks."""

    __slots__ = ("__weakref__",)


class Group:
    """Slots with common settings, counted and announced together."""

    def __init__(self, owner: str, settings: Settings) -> None:
        self.owner = owner  # for error texts
        self.slots: list[Slot] = []
        self.marks = bytearray()  # what this rank announces, one byte per slot
        self.passes = 0  # since the last reduction
        self.fired = False  # in the current pass
        self.met = False  # a round has covered this group since the last step()
        self._lease: Callable[[], Lease | None] = lambda: None
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        self.settings = settings
        # Derived here, for the hooks.
        self.passes_per_step = settings.passes_per_step
        self.separate = settings.op != AVERAGE
        self.compressed = settings.compression is not NoneCompressor
        self.prescale = 1.0 / settings.predivide
        self.postscale = settings.predivide

    @property
    def alive(self) -> bool:
        return self._lease() is not None

    def lease(self) -> Lease:
        lease = self._lease()
        if lease is None:
            lease = Lease()
            self._lease = weakref.ref(lease)
            weakref.finalize(lease, self._unhook).atexit = False
        return lease

    def _unhook(self) -> None:
        for slot in self.slots:
            for hook in slot.hooks:
                hook.remove()
            slot.hooks = []

    def clear_marks(self) -> None:
        self.marks = bytearray(len(self.slots))
        self.passes = 0


# ------------------------------------------------------------------------------------------------
# Agreement. Every announcement starts with `check_bytes`; see `GradientReducer`.

_DIGEST_BYTES = 8
CHECK_BYTES = 2 * _DIGEST_BYTES


def check_bytes(slots: Sequence[Slot]) -> bytes:
    """A digest of the slots, and its complement: a maximum over ranks changes one if they differ.

    (A rank that takes part with zeros changes nothing.)
    """
    text = "\n".join(map(str, slots))
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
    return digest + bytes(255 - byte for byte in digest)


def raise_first_difference(slots: Sequence[Slot], process_set: int) -> NoReturn:
    """Called on all ranks, when they do not agree: the same HorovodInternalError on all of them."""
    text = json.dumps([str(slot) for slot in slots]).encode() + b"\0"
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    name = "allgather.hvdtorch.gradient_layout"
    handle = _C.submit(
        ALLGATHER, name, "allgather", [tensor], False, False, 0, 1.0, 1.0, 0, None, process_set
    )
    handle.wait()
    texts = handle.outputs()[0].numpy().tobytes().split(b"\0")[:-1]
    lists = [json.loads(text) for text in texts]
    for rank, other in enumerate(lists):
        for index in range(max(len(lists[0]), len(other))):
            here, there = (
                ranks[index] if index < len(ranks) else "nothing" for ranks in (lists[0], other)
            )
            if here != there:
                raise HorovodInternalError(
                    f"the ranks disagree about the gradients to reduce: number {index} is {here} "
                    f"on rank 0, but {there} on rank {rank}. Wrap the same parameters on all "
                    "ranks, with the same names and settings and in the same order."
                )
    raise HorovodInternalError(
        "the announcement of a backward pass failed, although all ranks agree"
    )
