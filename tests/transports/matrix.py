"""The axes of the conformance matrix, and the cases they make: nothing here is listed by hand.

A `Case` is one operation on one tensor per rank: kind x dtype x layout (x op x scale factors where
values are reduced). Every rank can make the inputs of all ranks from the case alone, and so knows
the expected result. How cases are submitted (alone, fused, grouped, in place) and by whom (process
sets, transports) are further axes: see run_cases.py.
"""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import torch
from support import reference
from support.checks import ALL_DTYPES
from torch import Tensor

import hvdtorch as hvd

KINDS = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")
REDUCING = ("allreduce", "reducescatter")
ROWS_DIFFER = ("allgather", "alltoall")
OPS = {
    hvd.Average: "Average",
    hvd.Sum: "Sum",
    hvd.Min: "Min",
    hvd.Max: "Max",
    hvd.Product: "Product",
}
FACTORS = ((1.0, 1.0), (0.5, 3.0), (-1.7, 1.0), (1.0, 0.3), (0.1, 0.1))

Fill = Callable[..., Tensor]  # fill(*shape): a contiguous tensor of random values


def _sliced(fill: Fill) -> Tensor:
    return fill(6, 9)[1:5, 2:8:2]  # strides 9 and 2, an offset


# Each makes a tensor of one logical shape on all ranks; `turn` differs between ranks.
LAYOUTS: dict[str, Callable[[Fill, int], Tensor]] = {
    "contiguous": lambda fill, turn: fill(4, 3),
    "sliced": lambda fill, turn: _sliced(fill),
    "transposed": lambda fill, turn: fill(3, 4).t(),
    "channels_last": lambda fill, turn: fill(2, 3, 2, 3).to(memory_format=torch.channels_last),
    "expanded": lambda fill, turn: fill(1, 3).expand(4, 3),
    "0-dim": lambda fill, turn: fill(),
    "empty": lambda fill, turn: fill(0, 3),
    "empty rows": lambda fill, turn: fill(3, 0),
    "one row": lambda fill, turn: fill(1, 5),  # fewer than ranks
    "long": lambda fill, turn: fill(1201),
    "different on every rank": lambda fill, turn: (
        fill(4, 3),
        fill(3, 4).t(),
        _sliced(fill),
        fill(9)[4:7].expand(4, 3),
    )[turn % 4],
}
# For kinds whose rows may differ: also another number of rows on every rank.
UNEVEN_LAYOUTS: dict[str, Callable[[Fill, int], Tensor]] = {
    "uneven rows": lambda fill, turn: fill((2 * turn + 1) % 5, 3),
    "some without rows": lambda fill, turn: fill(3 * (turn % 2), 2, 2),
    "uneven and sliced": lambda fill, turn: fill(9, 8)[turn : 2 * turn + 1, 1:6:2],
}


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    dtype: torch.dtype
    layout: str
    reduction: reference.Reduction | None = None

    def __str__(self) -> str:
        text = f"{self.kind} {str(self.dtype).removeprefix('torch.')} {self.layout}"
        if self.reduction is None:
            return text
        factors = f"{self.reduction.prescale}, {self.reduction.postscale}"
        return f"{text} {OPS[self.reduction.op]}({factors})"

    @property
    def in_place(self) -> bool:
        """Whether the kind has an in-place form, and the layout can be written on all ranks."""
        return self.kind in ("allreduce", "broadcast") and self.layout not in (
            "expanded",
            "different on every rank",
        )

    @property
    def number(self) -> int:
        """Where the case leaves a choice, this makes it."""
        return _number(self.dtype, self.layout, self.reduction)

    def inputs(self, ranks: int) -> Sequence[Tensor]:
        """What each rank of the set contributes; not to be written to."""
        return _inputs(self.dtype, self.layout, self.reduction, ranks)

    def root(self, ranks: int) -> int:
        """The rank within the set that broadcasts."""
        return self.number % ranks

    def splits(self, inputs: Sequence[Tensor]) -> list[list[int]] | None:
        """For each rank, how many rows it sends to each; None where rows are cut evenly."""
        ranks = len(inputs)
        if self.number % 2 == 0 and all(t.shape[0] % ranks == 0 for t in inputs):
            return None
        splits = []
        for rank, tensor in enumerate(inputs):
            random = np.random.default_rng([self.number, rank, 1])
            cuts = np.sort(random.integers(0, tensor.shape[0] + 1, ranks))
            splits.append(np.diff(cuts, prepend=0).tolist())  # what is after the last cut stays
        return splits

    def expected(self, hosts: tuple[int, ...], index: int) -> Tensor:
        """What rank `index` of the set must get. `hosts`: by rank, equal for ranks on one host."""
        ranks = len(hosts)
        if self.reduction is not None:
            # A reducescatter adds up in rank order wherever the ranks are.
            hosts = hosts if self.kind == "allreduce" else (0,) * ranks
            whole = _reduced(self.dtype, self.layout, self.reduction, hosts)
            return whole if self.kind == "allreduce" else reference.share(whole, index, ranks)
        inputs = self.inputs(ranks)
        if self.kind == "broadcast":
            return inputs[self.root(ranks)]
        if self.kind == "allgather":
            return torch.cat(inputs)
        splits = self.splits(inputs) or [[t.shape[0] // ranks] * ranks for t in inputs]
        return reference.exchanged(inputs, splits, index)


# allreduce and reducescatter have the same cases but for what becomes of the result.
@cache
def _inputs(
    dtype: torch.dtype, layout: str, reduction: reference.Reduction | None, ranks: int
) -> Sequence[Tensor]:
    make = (LAYOUTS | UNEVEN_LAYOUTS)[layout]
    number = _number(dtype, layout, reduction)
    return [make(_fill(dtype, reduction, [number, rank]), number + rank) for rank in range(ranks)]


@cache
def _reduced(
    dtype: torch.dtype, layout: str, reduction: reference.Reduction, hosts: tuple[int, ...]
) -> Tensor:
    inputs = _inputs(dtype, layout, reduction, len(hosts))
    return reference.reduced(reduction, [t.contiguous() for t in inputs], hosts=hosts)


def _number(dtype: torch.dtype, layout: str, reduction: reference.Reduction | None) -> int:
    """The same in all processes: seeds what is chosen by chance."""
    return zlib.crc32(f"{dtype} {layout} {reduction}".encode())


def _fill(dtype: torch.dtype, reduction: reference.Reduction | None, seed: list[int]) -> Fill:
    random = np.random.default_rng(seed)
    make = _random_bits if reduction is None else _random_numbers

    def fill(*shape: int) -> Tensor:
        return make(dtype, math.prod(shape), random).reshape(shape)

    return fill


def cases(kind: str) -> Iterator[Case]:
    """All cases of a kind."""
    layouts = [name for name in LAYOUTS if kind in ("allreduce", "broadcast") or name != "0-dim"]
    if kind in ROWS_DIFFER:
        layouts += UNEVEN_LAYOUTS
    for dtype, layout in itertools.product(ALL_DTYPES, layouts):
        if kind not in REDUCING:
            yield Case(kind, dtype, layout)
            continue
        for op, (prescale, postscale) in itertools.product(OPS, FACTORS):
            scales = (prescale, postscale) != (1.0, 1.0)
            if has_meaning(op, dtype, scales) and (layout == "contiguous" or not scales):
                yield Case(kind, dtype, layout, reference.Reduction(op, prescale, postscale))


def has_meaning(op: int, dtype: torch.dtype, scales: bool) -> bool:
    """Whether values of the dtype can be reduced so."""
    if dtype == torch.bool:
        return op != hvd.Average and not scales
    return not (dtype.is_complex and op in (hvd.Min, hvd.Max))


# ----------------------------------------------------------------------------------------------
# Values


def _random_bits(dtype: torch.dtype, numel: int, random: np.random.Generator) -> Tensor:
    """Any bits that the dtype can hold, NaNs with payloads among them."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    if dtype == torch.bool:
        return torch.from_numpy(random.integers(0, 2, numel).astype(bool))
    data = bytearray(random.bytes(numel * dtype.itemsize))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype)


def _random_numbers(dtype: torch.dtype, numel: int, random: np.random.Generator) -> Tensor:
    """Integers of the whole range; floats of many magnitudes, infinities and NaNs among them."""
    if dtype.is_complex:
        real = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.complex(*_random_numbers(real, 2 * numel, random).reshape(2, numel))
    if not dtype.is_floating_point:
        return _random_bits(dtype, numel, random)
    info = torch.finfo(dtype)
    spread = {1: 2, 2: 5, 4: 20, 8: 40}[dtype.itemsize]  # binary orders of magnitude around 1
    numbers = random.standard_normal(numel) * 2.0 ** random.integers(-spread, spread, numel)
    special = [np.inf, -np.inf, np.nan, info.max, -info.max / 2, info.smallest_normal / 2, 0.0]
    chosen = random.random(numel) < 0.15
    numbers[chosen] = random.choice(special, int(chosen.sum()))
    return torch.from_numpy(numbers).to(dtype)
