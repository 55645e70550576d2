"""The step of an optimizer with op=Adasum: the ranks' own steps are combined into one.

Each rank's optimizer steps on its own gradients. The change it made to a parameter (delta = value
after - value before) is combined with the other ranks' by Adasum, and the parameter becomes its
value before plus the combined change. Deltas that point the same way are averaged, orthogonal ones
are added (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021).

Ranks may differ in which parameters have a gradient. So before the deltas are sent the ranks say,
one byte per parameter, which they have stepped; one that no rank has stepped stays out of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import _C
from .exceptions import HorovodInternalError
from .gradient_groups import CHECK_BYTES, check_bytes, first_difference, readable
from .operation import ADASUM, ALLREDUCE, MAX, check_member
from .process_sets import ProcessSet

_submit = _C.submit


class AdasumStep:
    """The step that is going on, of one optimizer."""

    def __init__(self, process_set: ProcessSet, compression: Any) -> None:
        self._process_set = process_set
        self._compression = compression
        self._named: list[tuple[str, Tensor]] = []  # (name, parameter)
        self._starts: list[Tensor] = []  # their values before the step
        self._check = b""
        self._checked: list[int] = []  # ids of the parameters that `_check` is about

    def begin(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Before the optimizer's own step: remember the values of its (name, parameter) pairs."""
        check_member(self._process_set, "DistributedOptimizer with op=hvd.Adasum")
        self._named = [
            (name, each)
            for name, each in parameters
            if each.dtype.is_floating_point or each.is_complex()
        ]
        self._starts = [each.detach().clone() for _, each in self._named]
        for _, each in self._named:
            if each.grad is not None and readable(each.grad) is not each.grad:
                each.grad = readable(each.grad)

    @torch.no_grad()
    def finish(self) -> None:
        """After it: combine what all ranks changed. If that fails, the step is undone here."""
        starts, self._starts = self._starts, []
        parameters = [parameter for _, parameter in self._named]
        try:
            stepped = self._stepped_anywhere(starts)
            if stepped:
                self._combine(stepped, starts)
        except BaseException:
            for parameter, start in zip(parameters, starts, strict=True):
                parameter.copy_(start)
            raise

    def _stepped_anywhere(self, starts: list[Tensor]) -> list[int]:
        """Indices of the parameters that some rank has stepped. Raises HorovodInternalError, on all
        ranks, if the ranks' parameters differ."""
        ids = [id(parameter) for _, parameter in self._named]
        texts = [f"{name!r} {list(p.shape)} {p.dtype} (op=Adasum)" for name, p in self._named]
        if ids != self._checked:
            self._check, self._checked = check_bytes(texts), ids
        announcement = bytearray(self._check)
        announcement += bytes(
            parameter.grad is not None or not torch.equal(parameter, start)
            for (_, parameter), start in zip(self._named, starts, strict=True)
        )
        wire = torch.frombuffer(announcement, dtype=torch.uint8)
        try:
            self._allreduce("allreduce", "hvdtorch.adasum_step", [wire], MAX)
            agreed = announcement.startswith(self._check)
        except HorovodInternalError:
            if not _C.is_running():
                raise
            agreed = False  # they differ in length
        if not agreed:
            self._raise_difference(texts)
        marks = announcement[CHECK_BYTES:]
        return [index for index, mark in enumerate(marks) if mark]

    def _raise_difference(self, texts: list[str]) -> None:
        difference = first_difference(texts, self._process_set)
        while True:
            try:
                next(difference)
            except StopIteration as result:
                raise HorovodInternalError(result.value) from None

    def _combine(self, indices: list[int], starts: list[Tensor]) -> None:
        compress, decompress = self._compression.compress, self._compression.decompress
        wires, contexts = [], []
        for index in indices:
            wire, context = compress(self._named[index][1] - starts[index])
            wires.append(wire)
            contexts.append(context)
        name = f"{self._named[indices[0]][0]}.adasum"
        self._allreduce("grouped_allreduce", name, wires, ADASUM)
        for index, wire, context in zip(indices, wires, contexts, strict=True):
            self._named[index][1].copy_(starts[index]).add_(decompress(wire, context))

    def _allreduce(self, label: str, name: str, tensors: list[Tensor], op: int) -> None:
        grouped = label != "allreduce"
        number = self._process_set.process_set_id or 0
        _submit(
            ALLREDUCE,
            f"{label}.{name}",
            label,
            tensors,
            grouped,
            True,
            op,
            1.0,
            1.0,
            0,
            None,
            number,
        ).wait()
