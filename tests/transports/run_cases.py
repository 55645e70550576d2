"""What the ranks do with the cases of the matrix: submit them in every way, compare the results.

Runs on the ranks. `run` takes one kind through one process set, in the ways of `WAYS`.
"""

import random
from collections.abc import Callable, Iterator, Sequence

import matrix
import torch
from matrix import Case
from support import reference
from torch import Tensor

import hvdtorch as hvd

BATCH = 300  # operations in flight at once
LARGEST_GROUP = 7


class Prepared:
    """A case with the inputs of all ranks and what this rank must get; used once per way."""

    def __init__(self, case: Case, index: int, hosts: tuple[int, ...]) -> None:
        self.case = case
        self.inputs = case.inputs(len(hosts))
        self.index = index
        self.given = self.inputs[index]  # laid out as the case says; never written
        self.expected = case.expected(hosts, index)

    def tensor(self, in_place: bool) -> Tensor:
        """What to pass: for in-place forms a copy in the same layout."""
        if not in_place:
            return self.given
        copy = torch.empty_strided(self.given.shape, self.given.stride(), dtype=self.given.dtype)
        return copy.copy_(self.given)

    def options(self, members: Sequence[int]) -> dict[str, object]:
        case = self.case
        if case.reduction is not None:
            return {
                "op": case.reduction.op,
                "prescale_factor": case.reduction.prescale,
                "postscale_factor": case.reduction.postscale,
            }
        if case.kind == "broadcast":
            return {"root_rank": members[case.root(len(members))]}
        if case.kind == "alltoall":
            splits = case.splits(self.inputs)
            return {} if splits is None else {"splits": splits[self.index]}
        return {}

    def complaint(self, result: Tensor, passed: Tensor, in_place: bool) -> str:
        """Empty if the result is right."""
        wrong = reference.difference(result, self.expected)
        if in_place:
            if result is not passed:
                wrong = wrong or "is not the tensor given"
        elif not result.is_contiguous():
            wrong = wrong or "is not contiguous"
        form = " in place" if in_place else ""
        return f"{self.case}{form}: {wrong}" if wrong else ""


def _function(kind: str, prefix: str = "", suffix: str = "") -> Callable[..., object]:
    return getattr(hvd, prefix + kind + suffix)


def _rows(result: object) -> Tensor:
    return result[0] if isinstance(result, tuple) else result  # an alltoall's, with its splits


def alone(prepared: list[Prepared], members: list[int], process_set: object) -> Iterator[str]:
    """One after another, blocking; half of those that can be in place are."""
    for one in prepared:
        in_place = one.case.in_place and one.case.number % 2 == 0
        tensor = one.tensor(in_place)
        call = _function(one.case.kind, suffix="_" if in_place else "")
        result = _rows(call(tensor, process_set=process_set, **one.options(members)))
        yield one.complaint(result, tensor, in_place)


def fused(prepared: list[Prepared], members: list[int], process_set: object) -> Iterator[str]:
    """Many at once, submitted and waited for in an order of this rank's own."""
    shuffle = random.Random(hvd.rank()).shuffle
    forms = list(_forms(prepared))
    for start in range(0, len(forms), BATCH):
        batch = list(enumerate(forms[start : start + BATCH]))
        shuffle(batch)
        flying = []
        for i, (in_place, one) in batch:
            tensor = one.tensor(in_place)
            call = _function(one.case.kind, suffix="_async_" if in_place else "_async")
            options = one.options(members)
            handle = call(tensor, name=f"case.{i}", process_set=process_set, **options)
            flying.append((handle, one, tensor, in_place))
        shuffle(flying)
        for handle, one, tensor, in_place in flying:
            yield one.complaint(_rows(hvd.synchronize(handle)), tensor, in_place)


def grouped(prepared: list[Prepared], members: list[int], process_set: object) -> Iterator[str]:
    """Groups of mixed dtypes and layouts, many at once, in an order of this rank's own."""
    alike: dict[object, list[Prepared]] = {}
    for in_place, one in _forms(prepared):
        alike.setdefault((in_place, one.case.reduction), []).append(one)
    groups = []
    for (in_place, _), ones in alike.items():
        random.Random(0).shuffle(ones)  # the same on all ranks: members have an order
        for start in range(0, len(ones), LARGEST_GROUP):
            groups.append((in_place, ones[start : start + LARGEST_GROUP]))
    numbered = list(enumerate(groups))
    shuffle = random.Random(hvd.rank()).shuffle
    shuffle(numbered)
    flying = []
    for i, (in_place, ones) in numbered:
        tensors = [one.tensor(in_place) for one in ones]
        kind = ones[0].case.kind
        call = _function(kind, "grouped_", "_async_" if in_place else "_async")
        options = ones[0].options(members)
        handle = call(tensors, name=f"group.{i}", process_set=process_set, **options)
        flying.append((handle, ones, tensors, in_place))
    shuffle(flying)
    for handle, ones, tensors, in_place in flying:
        results = hvd.synchronize(handle)
        for one, result, tensor in zip(ones, results, tensors, strict=True):
            yield one.complaint(result, tensor, in_place)


def _forms(prepared: list[Prepared]) -> Iterator[tuple[bool, Prepared]]:
    """Every case out of place, and in place where there is such a form."""
    for one in prepared:
        yield False, one
        if one.case.in_place:
            yield True, one


WAYS = {"alone": alone, "fused": fused, "grouped": grouped}
_WITHOUT_GROUPS = ("broadcast", "alltoall")


def run(kind: str, members: list[int] | None, hosts: Sequence[int]) -> int:
    """All cases of `kind`, in every way, among the ranks `members` (None: all, the global set).

    `hosts`: by rank of the job, equal for ranks on one host.

    Returns how many results were compared; AssertionError that names the cases if some are wrong.
    Every rank of the job calls it: process sets are made by all together.
    """
    process_set = hvd.global_process_set
    if members is not None:
        process_set = hvd.add_process_set(members)
    try:
        if not process_set.included():
            return 0
        return _run(kind, process_set, hosts)
    finally:
        if members is not None:
            hvd.remove_process_set(process_set)


def _run(kind: str, process_set: object, hosts: Sequence[int]) -> int:
    members = process_set.ranks
    index = process_set.rank()
    placed = tuple(hosts[member] for member in members)
    prepared = [Prepared(case, index, placed) for case in matrix.cases(kind)]
    before = [reference.bits(one.given) for one in prepared]
    compared, wrong = 0, []
    for name, way in WAYS.items():
        if name == "grouped" and kind in _WITHOUT_GROUPS:
            continue
        for complaint in way(prepared, members, process_set):
            compared += 1
            if complaint:
                wrong.append(f"{name}: {complaint}")
    for one, bits in zip(prepared, before, strict=True):
        if not torch.equal(reference.bits(one.given), bits):
            wrong.append(f"{one.case}: the input was changed")
    if wrong:
        shown = "\n".join(wrong[:10])
        raise AssertionError(f"{len(wrong)} of {compared} results are wrong:\n{shown}")
    return compared
