"""One operation: what it is, how it is submitted, waited for and differentiated.

An `Operation` says everything about a collective but its tensors. It has two ways to be executed:
`submit` hands it to the native core and returns a `Handle`; `run` does the same, waits, and is
differentiable (`_Collective`, the one autograd function, with one gradient rule per kind below it).
The public functions in collectives.py are descriptions of operations; nothing else calls the core.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from .exceptions import HorovodInternalError
from .process_sets import ProcessSet

# Values of OpKind and ReduceOp in csrc/core/types.h.
ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER, JOIN = range(7)
AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)

_CPU = torch.device("cpu")
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_INTEGERS |= {torch.uint16, torch.uint32, torch.uint64}


# ----------------------------------------------------------------------------------------------
# What a rank can check alone


def check_member(process_set: ProcessSet, what: str) -> None:
    """Raise unless this process may take part in an operation of `process_set`."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"{what}: process_set must be a hvd.ProcessSet, not {process_set!r}; "
            "leave it out for all ranks"
        )
    if process_set.process_set_id is None:
        raise TypeError(
            f"{what}: {process_set} is not registered with the job, or was removed: all ranks must "
            "call hvd.add_process_set() with it first"
        )
    if process_set.ranks is None:
        raise HorovodInternalError(f"{what}: hvdtorch is not initialized, call hvd.init() first")
    if not process_set.included():
        raise ValueError(f"{what}: this rank is not a member of {process_set}")


def check_tensor(tensor: object, what: str, in_place: bool) -> None:
    """Raise for what is not a dense tensor, or cannot be written if `in_place`.

    The core checks the rest: device, dtype, op.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{what}: expected a torch.Tensor, got {type(tensor).__name__}; "
            "convert it with torch.as_tensor"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{what}: a {tensor.layout} tensor has no dense layout; pass tensor.to_dense()"
        )
    if in_place and overlaps_itself(tensor):
        raise ValueError(
            f"{what}: cannot write into a tensor whose elements share memory (an expanded one, or "
            "overlapping windows); pass tensor.contiguous()"
        )


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether several elements may be the same memory, as after `expand` or `unfold`.

    They are not if each dim strides over all that the dims of smaller stride span. Dims that are
    interlaced without meeting, which only `as_strided` makes, count as overlapping.
    """
    if tensor.is_contiguous() or tensor.numel() == 0:
        return False
    end = 0  # the farthest element of the dims seen so far
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= end:
                return True
            end += (length - 1) * stride
    return False


# ----------------------------------------------------------------------------------------------
# Handles


class Handle:
    """One operation in flight, as returned by the `_async` functions.

    It keeps the operation's tensors alive until `synchronize` has returned its result.
    """

    __slots__ = ("__weakref__", "_future", "_native", "_operation", "_tensors")

    def __init__(self, operation: Operation, native: _C.Handle, tensors: list[Tensor]) -> None:
        self._operation = operation
        self._native: _C.Handle | None = native
        self._tensors = tensors
        self._future: torch.futures.Future[Any] | None = None

    def done(self) -> bool:
        """True once `wait` and `synchronize` would not block, also after a failure."""
        return self._native is None or self._native.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the operation is complete, or for at most `timeout` seconds.

        Returns whether it is complete. Unlike `synchronize` it can be called again. Raises
        HorovodInternalError if the operation failed. Signal handlers run while it waits.
        """
        native = self._native
        return native is None or native.wait(timeout)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of what `synchronize` returns; asking for it does not use the handle up.

        Callbacks added to it run on a thread of the runtime, or on one that waits for an operation,
        and must not wait for other operations.
        Raises ValueError if the handle was already synchronized.
        """
        if self._future is not None:
            return self._future
        native, tensors, operation = self._native, self._tensors, self._operation
        if native is None:
            raise ValueError("this operation was already synchronized: ask for its future before")
        devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
        future = torch.futures.Future[Any](devices=[torch.device("cuda", i) for i in devices])
        self._future = future

        def complete() -> None:
            text = native.error()
            if text is None:
                future.set_result(operation.result(native, tensors))
            else:
                future.set_exception(HorovodInternalError(text))

        native.add_done_callback(complete)
        return future

    def _synchronize(self) -> Any:
        """Wait, return the result, forget the operation. An interrupted wait forgets nothing."""
        native, tensors = self._native, self._tensors
        if native is None:
            return None
        try:
            self.wait()
            return self._operation.result(native, tensors)
        finally:
            if native.done():
                self._native = None
                self._tensors = []

    def __repr__(self) -> str:
        state = "synchronized" if self._native is None else "done" if self.done() else "in flight"
        return f"<hvdtorch.Handle {self._operation.describe()}, {state}>"


def poll(handle: Handle) -> bool:
    """True once `synchronize(handle)` would not block.

    Raises ValueError for a handle that was already synchronized, and for anything that is no
    handle.
    """
    if not isinstance(handle, Handle) or handle._native is None:
        raise ValueError(f"poll: {handle!r} is no handle of an operation still to be synchronized")
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result; the handle is then used up.

    The result is a tensor, for a group a tuple of tensors in input order, for an alltoall the pair
    of rows and received splits. None for a handle that was already synchronized, and for anything
    that is no handle. Raises HorovodInternalError if the operation failed.
    """
    return handle._synchronize() if isinstance(handle, Handle) else None


# ----------------------------------------------------------------------------------------------
# The one submit path and the one autograd function


@dataclasses.dataclass(slots=True, kw_only=True)
class Operation:
    """An operation without its tensors."""

    kind: int
    label: str  # the first part of the full name: "grouped_allreduce"
    process_set: ProcessSet
    function: str = ""  # the public function that was called, if it is not named like the label
    name: str | None = None
    in_place: bool = False
    reduce_op: int = SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0  # rank within the process set
    splits: list[int] | None = None  # alltoall: rows to each rank of the set
    splits_device: torch.device = _CPU  # where the received ones are put
    # allgather, when complete: per tensor the rows of each rank of the set
    rows: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def grouped(self) -> bool:
        return self.label.startswith("grouped_")

    def describe(self) -> str:
        return f"{self.label}.{self.name}" if self.name else f"unnamed {self.label}"

    def submit(self, tensors: Sequence[Tensor]) -> Handle:
        """Check what this rank can see alone, and hand the operation to the core."""
        given = list(tensors)
        return Handle(self, self._start(given, wait=False), given)

    def _start(self, tensors: list[Tensor], wait: bool) -> _C.Handle:
        what = self.function or self.label
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"{what}: name must be a str or None, not {self.name!r}")
        check_member(self.process_set, what)
        for tensor in tensors:
            check_tensor(tensor, what, self.in_place)
        self._check_factors(tensors, what)
        return _C.submit(
            self.kind,
            f"{self.label}.{self.name}" if self.name else "",
            self.label,
            tensors,
            self.grouped,
            self.in_place,
            self.reduce_op,
            self.prescale,
            self.postscale,
            self.root,
            self.splits,
            self.process_set.process_set_id or 0,
            wait,
        )

    def _check_factors(self, tensors: Sequence[Tensor], what: str) -> None:
        if math.isfinite(self.prescale) and math.isfinite(self.postscale):
            return
        for argument, value in (("prescale", self.prescale), ("postscale", self.postscale)):
            if not math.isfinite(value) and any(t.dtype in _INTEGERS for t in tensors):
                raise ValueError(
                    f"{what}: {argument}_factor={value}, and integers cannot be scaled by {value}; "
                    "pass a finite factor, or convert the tensor to a floating point dtype"
                )

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Submit, wait, return the results in input order; differentiable."""
        if torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in tensors
        ):
            return list(_Collective.apply(self, *tensors))
        return self.run_detached(tensors)

    def run_detached(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`run`, unseen by autograd."""
        given = list(tensors)
        results = self.result(self._start(given, wait=True), given)
        return list(results) if isinstance(results, tuple) else [results]

    def result(self, native: _C.Handle, tensors: list[Tensor]) -> Any:
        """What `synchronize` returns for the completed operation on `tensors`."""
        outputs = tensors if self.in_place else native.outputs()
        if self.kind == ALLGATHER:
            self.rows = [native.numbers(member) for member in range(len(tensors))]
        if self.kind == ALLTOALL:
            received = native.numbers()
            return outputs[0], torch.tensor(received, dtype=torch.int32, device=self.splits_device)
        if self.grouped:
            return tuple(outputs)
        return outputs[0] if outputs else None

    def derived(self, **changes: Any) -> Operation:
        """The unnamed operation of the same process set that a gradient needs."""
        return dataclasses.replace(self, name=None, function="", **changes)

    def average(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients averaged over the ranks, in one operation."""
        label = "grouped_allreduce" if self.grouped else "allreduce"
        return self.derived(kind=ALLREDUCE, label=label, reduce_op=AVERAGE).run(gradients)


class _Collective(torch.autograd.Function):
    """Any blocking collective as a node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = operation.run_detached(tensors)
        ctx.operation = operation
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        if operation.kind == ALLTOALL:
            ctx.received = outputs[1].tolist()
            ctx.mark_non_differentiable(outputs[1])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        results = _GRADIENTS[ctx.operation.kind](ctx, gradients)
        needed = ctx.needs_input_grad[1:]
        return (None, *(g if need else None for g, need in zip(results, needed, strict=True)))


def _allreduce_gradient(ctx: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The same allreduce of the gradients, whatever the op; exact for Sum and Average."""
    operation: Operation = ctx.operation
    return operation.derived().run(gradients)


def _allgather_gradient(ctx: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The rows this rank contributed, of the average of the gradients over the ranks."""
    operation: Operation = ctx.operation
    rank = operation.process_set.rank() or 0
    return [
        average.narrow(0, sum(rows[:rank]), rows[rank])
        for average, rows in zip(operation.average(gradients), operation.rows, strict=True)
    ]


def _broadcast_gradient(ctx: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
    """On the root the average of the gradients over the ranks, zeros elsewhere."""
    operation: Operation = ctx.operation
    averages = operation.average(gradients)
    if operation.process_set.rank() == operation.root:
        return averages
    return [torch.zeros_like(gradient) for gradient in gradients]


def _alltoall_gradient(ctx: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradient's rows, back where they came from; zeros for rows that went nowhere."""
    operation: Operation = ctx.operation
    sent = operation.splits or []
    back = operation.derived(splits=ctx.received, splits_device=_CPU)
    gradient, returned = back.run([gradients[0]])
    # A rank that has joined since returns nothing.
    pieces = [
        piece if piece.shape[0] == count else _no_rows(gradient, count)
        for piece, count in zip(gradient.split(returned.tolist()), sent, strict=True)
    ]
    return [torch.cat([*pieces, _no_rows(gradient, ctx.rows[0] - sum(sent))])]


def _reducescatter_gradient(ctx: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of all shares, times the factors, and times the number of ranks if Sum."""
    operation: Operation = ctx.operation
    factor = operation.prescale * operation.postscale
    ranks = operation.process_set.size() or 1
    if operation.reduce_op == SUM:
        factor *= ranks
    if factor != 1:
        gradients = [gradient * factor for gradient in gradients]
    label = "grouped_allgather" if operation.grouped else "allgather"
    gather = operation.derived(kind=ALLGATHER, label=label)
    gathered = gather.run(gradients)
    # From a rank that has joined since, no gradient came for its share.
    return [
        _with_absent_shares(gradient, rows, count)
        for gradient, rows, count in zip(gathered, gather.rows, ctx.rows, strict=True)
    ]


def _with_absent_shares(gathered: Tensor, given: list[int], rows: int) -> Tensor:
    """Each rank's share of `rows` rows, zeros for a rank that has given none."""
    ranks = len(given)
    shares = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    if given == shares:
        return gathered
    pieces = gathered.split(given)
    return torch.cat(
        [
            piece if count == share else _no_rows(gathered, share)
            for piece, count, share in zip(pieces, given, shares, strict=True)
        ]
    )


def _no_rows(like: Tensor, rows: int) -> Tensor:
    """`rows` rows of zeros."""
    return like.new_zeros(rows, *like.shape[1:])


_GRADIENTS: dict[int, Callable[[Any, Sequence[Tensor]], list[Tensor]]] = {
    ALLREDUCE: _allreduce_gradient,
    ALLGATHER: _allgather_gradient,
    BROADCAST: _broadcast_gradient,
    ALLTOALL: _alltoall_gradient,
    REDUCESCATTER: _reducescatter_gradient,
}
