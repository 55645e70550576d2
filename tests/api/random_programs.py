"""Random programs: what they are made of, and how a rank runs one. Used by test_random_programs.py.

A program is a sequence of *rounds*, a round some operations (`Op`) of mixed kinds, dtypes, sizes
and process sets. All ranks make the same program from a seed, each operation with the inputs of all
ranks and so with the expected result. But each rank submits a round's operations in an order of its
own, from several Python threads at once, and waits for them in yet another order.

Rounds come in *episodes*. In an episode there may be further process sets, added at its start and
removed at its end, and it may end in a join: then every rank leaves after a round of its own choice
while the others go on.
"""

import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support import reference
from support.checks import ALL_DTYPES
from torch import Tensor

import hvdtorch as hvd

THREADS = 3
ROUNDS_PER_EPISODE = 10
OPERATIONS_PER_ROUND = 8
GROUPABLE = ("allreduce", "allgather", "reducescatter")
IN_PLACE = ("allreduce", "broadcast")
LONG = (torch.float32, torch.float64, torch.bfloat16)  # dtypes of the few large tensors


@dataclasses.dataclass
class Op:
    """One operation, as all ranks know it. Ranks in it are ranks within the process set."""

    seed: str
    kind: str  # "allreduce", ..., "disagreement"
    process_set: Any
    present: list[int]  # without those that have joined
    divisor: int  # of an average
    name: str | None
    grouped: bool = False
    in_place: bool = False
    reduction: reference.Reduction | None = None
    root: int = 0
    members: list[tuple[torch.dtype, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    _inputs: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict, repr=False)

    def inputs(self, rank: int) -> list[Tensor]:
        """What a rank submits, one tensor per member of the group; not to be written to."""
        if rank not in self._inputs:
            self._inputs[rank] = self._make_inputs(rank)
        return self._inputs[rank]

    def _make_inputs(self, rank: int) -> list[Tensor]:
        generator = np.random.default_rng([*self.seed.encode(), rank])
        return [self._input(dtype, shape, generator, rank) for dtype, shape in self.members]

    def _input(
        self, dtype: torch.dtype, shape: tuple[int, ...], generator: np.random.Generator, rank: int
    ) -> Tensor:
        if self.kind in ("allgather", "alltoall"):
            shape = (int(generator.integers(0, shape[0] + 1)), *shape[1:])
        if self.kind == "disagreement" and rank == self.present[0]:
            shape = (shape[0] + 1, *shape[1:])
        # Any integer a byte can hold: exact, or exactly rounded, in every dtype.
        numbers = generator.integers(-128, 128, shape)
        values = torch.from_numpy(numbers).to(torch.float64 if dtype.is_complex else torch.int64)
        if dtype == torch.bool:
            return values > 0
        if not dtype.is_floating_point:
            return values.to(dtype)
        return (values.double() / 16).to(dtype)

    def splits(self, rank: int) -> list[int]:
        """alltoall: what a rank sends to each."""
        size = self.process_set.size()
        if rank not in self.present:
            return [0] * size
        rows = self.inputs(rank)[0].shape[0]
        generator = random.Random(f"{self.seed} splits {rank}")
        cuts = sorted(generator.randint(0, rows) for _ in range(size))
        return [after - before for before, after in zip([0, *cuts], cuts, strict=False)]

    def expected(self, rank: int) -> list[Tensor]:
        """What a rank must get, one tensor per member of the group."""
        everyones = [self.inputs(r) for r in self.present]
        return [
            self._expected([inputs[member] for inputs in everyones], rank)
            for member in range(len(self.members))
        ]

    def _expected(self, inputs: list[Tensor], rank: int) -> Tensor:
        size = self.process_set.size()
        if self.reduction is not None:
            whole = reference.reduced(self.reduction, inputs, self.divisor)
            return whole if self.kind == "allreduce" else reference.share(whole, rank, size)
        if self.kind == "broadcast":
            return inputs[self.present.index(self.root)]
        if self.kind == "allgather":
            return torch.cat(inputs)
        return reference.exchanged(inputs, [self.splits(r) for r in self.present], rank)

    def submit(self, rank: int) -> tuple[Any, list[Tensor]]:
        """The handle, and the tensors given."""
        tensors = self._make_inputs(rank) if self.in_place else self.inputs(rank)
        kind = "allreduce" if self.kind == "disagreement" else self.kind
        options: dict[str, Any] = {"name": self.name, "process_set": self.process_set}
        if self.reduction is not None:
            options |= {
                "op": self.reduction.op,
                "prescale_factor": self.reduction.prescale,
                "postscale_factor": self.reduction.postscale,
            }
        if kind == "broadcast":
            options["root_rank"] = self.process_set.ranks[self.root]
        if kind == "alltoall":
            options["splits"] = self.splits(rank)
        prefix, suffix = "grouped_" * self.grouped, "_async" + "_" * self.in_place
        function = getattr(hvd, prefix + kind + suffix)
        return function(tensors if self.grouped else tensors[0], **options), tensors

    def check(self, rank: int, result: Any, given: Sequence[Tensor]) -> None:
        """AssertionError unless `result` is what `synchronize` must return to a rank."""
        results = [result] if isinstance(result, Tensor) else list(result)
        if self.kind == "alltoall":
            *results, received = results
            sent = [self.splits(r)[rank] for r in range(self.process_set.size())]
            assert received.tolist() == sent, f"{self}: received {received}, not {sent}"
        for one, tensor, wanted in zip(results, given, self.expected(rank), strict=True):
            wrong = reference.difference(one, wanted)
            assert not wrong, f"{self}: {wrong}"
            assert not self.in_place or one is tensor, f"{self}: not the tensor given"


class Program:
    """All of a rank's part in a program; the ranks' parts differ in order and threads only."""

    def __init__(self, seed: int, rounds: int, divide_by_active: bool = False) -> None:
        self.seed = seed
        self.rounds = rounds
        self.divide_by_active = divide_by_active  # what an average divides by after a join
        self.order = random.Random(f"{seed} order of {hvd.rank()}")
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="program")
        self.compared = 0

    def run(self) -> int:
        """Returns the number of operations this rank took part in."""
        with self.threads:
            for start in range(0, self.rounds, ROUNDS_PER_EPISODE):
                self._episode(start)
        return self.compared

    def _episode(self, start: int) -> None:
        choose = random.Random(f"{self.seed} episode {start}")
        sets = [hvd.global_process_set]
        subsets = _some_subsets(choose) if choose.random() < 0.5 else []
        sets += [hvd.add_process_set(ranks) for ranks in subsets]
        joins = choose.random() < 0.4
        last = [
            choose.randrange(ROUNDS_PER_EPISODE) if joins else ROUNDS_PER_EPISODE
            for _ in range(hvd.size())
        ]
        for step in range(ROUNDS_PER_EPISODE):
            active = [rank for rank in range(hvd.size()) if step <= last[rank]]
            if hvd.rank() in active:
                self._round(list(self._operations(start + step, sets, active)))
        if joins:
            stayed = [rank for rank in range(hvd.size()) if last[rank] == max(last)]
            if hvd.rank() in stayed:  # complete when all others have joined
                count = hvd.allreduce(torch.tensor(1), op=hvd.Sum, name="stayed")
                assert count == len(stayed), f"{count} ranks stayed, not {stayed}"
            latest = hvd.join()
            assert latest in stayed, f"rank {latest} was not the last to join, {stayed} were"
            everyones = hvd.allgather(torch.tensor([latest]))
            assert everyones.tolist() == [latest] * hvd.size()
        shuffled = sets[1:]
        choose.shuffle(shuffled)
        for process_set in shuffled:
            assert hvd.remove_process_set(process_set)

    def _operations(self, step: int, sets: list[Any], active: list[int]) -> Iterator[Op]:
        """The operations of a round that this rank takes part in."""
        choose = random.Random(f"{self.seed} round {step}")
        for number in range(choose.randint(1, OPERATIONS_PER_ROUND)):
            process_set = choose.choice(sets)
            present = [i for i, rank in enumerate(process_set.ranks) if rank in active]
            divisor = len(present) if self.divide_by_active else process_set.size()
            op = _random_operation(
                choose, f"{self.seed} {step} {number}", process_set, present, divisor
            )
            if op is not None and process_set.included():
                yield op

    def _round(self, operations: list[Op]) -> None:
        parts = self._shared_out(operations)
        seeds = [self.order.random() for _ in parts]
        for done in [
            self.threads.submit(_submit_and_wait, part, seed)
            for part, seed in zip(parts, seeds, strict=True)
        ]:
            done.result()
        self.compared += len(operations)

    def _shared_out(self, operations: list[Op]) -> list[list[Op]]:
        """A part for each thread. Operations without a name are matched by their order, so those
        of all kinds and sets stay in one thread, in the order they have."""
        parts: list[list[Op]] = [[] for _ in range(THREADS)]
        named = [op for op in operations if op.name is not None]
        self.order.shuffle(named)
        for op in named:
            self.order.choice(parts).append(op)
        part = self.order.choice(parts)
        unnamed = [op for op in operations if op.name is None]
        places = sorted(self.order.randint(0, len(part)) for _ in unnamed)
        for shift, (place, op) in enumerate(zip(places, unnamed, strict=True)):
            part.insert(place + shift, op)
        return parts


def _submit_and_wait(operations: list[Op], seed: float) -> None:
    """What one thread does in a round."""
    order = random.Random(seed)
    flying = []
    for op in operations:
        rank = op.process_set.rank()
        flying.append((op, rank, *op.submit(rank)))
    order.shuffle(flying)
    for op, rank, handle, given in flying:
        way = order.choice(("synchronize", "poll", "future"))
        while way == "poll" and not hvd.poll(handle):
            time.sleep(0.0005)
        if op.kind == "disagreement":
            with pytest.raises(hvd.HorovodInternalError, match="disagree on shape"):
                hvd.synchronize(handle)
            continue
        if way == "future":
            op.check(rank, handle.get_future().wait(), given)
        op.check(rank, hvd.synchronize(handle), given)


def _some_subsets(choose: random.Random) -> list[list[int]]:
    """Up to two different sets of ranks, none of them all ranks."""
    size = hvd.size()
    subsets = []
    for _ in range(2):
        ranks = sorted(choose.sample(range(size), choose.randint(1, size)))
        if len(ranks) < size and ranks not in subsets:
            subsets.append(ranks)
    return subsets


def _random_operation(
    choose: random.Random, seed: str, process_set: Any, present: list[int], divisor: int
) -> Op | None:
    kinds = ["allreduce"] * 3 + ["allgather", "broadcast", "alltoall", "reducescatter"]
    kind = choose.choice([*kinds, "disagreement"])
    unnamed = choose.random() < 0.2
    grouped = kind in GROUPABLE and choose.random() < 0.3
    reduces = kind in ("allreduce", "reducescatter")
    op = choose.choice((hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product))
    factors = choose.choice(((1.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.75, 3.0)))
    dtypes = [d for d in ALL_DTYPES if not reduces or _has_meaning(op, d, factors != (1.0, 1.0))]
    members = []
    for _ in range(choose.randint(1, 4) if grouped else 1):
        dtype = choose.choice(dtypes)
        shape = (choose.choice((0, 1, 5, 12, 60)), choose.choice((1, 3, 7)))
        if choose.random() < 0.05:
            dtype, shape = choose.choice(LONG), (choose.choice((999, 20_001)), 5)
        members.append((dtype, shape))
    # A name tells the number of the operation, not of the round: it comes back.
    name = None if unnamed else f"{kind}.{seed.rsplit(' ', 1)[1]}"
    in_place = kind in IN_PLACE and choose.random() < 0.5 and not (grouped and kind == "broadcast")
    root = choose.choice(present) if present else 0
    if not present or (kind == "disagreement" and len(present) < 2):
        return None
    reduction = reference.Reduction(op, *factors) if reduces else None
    if kind == "disagreement":
        reduction = reference.Reduction(hvd.Sum)  # which every dtype has
    return Op(
        seed=seed,
        kind=kind,
        process_set=process_set,
        present=present,
        divisor=divisor,
        name=name,
        grouped=grouped,
        in_place=in_place,
        reduction=reduction,
        root=root,
        members=members,
    )


def _has_meaning(op: int, dtype: torch.dtype, scales: bool) -> bool:
    if dtype == torch.bool:
        return op != hvd.Average and not scales
    return not (dtype.is_complex and op in (hvd.Min, hvd.Max))
