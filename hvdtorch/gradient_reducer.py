"""The gradient reducer: averages gradients over the ranks while `backward()` runs.

Words used here:

- A *slot* is a parameter this process reduces. A *group* is the slots that one optimizer brought
  in, with that optimizer's settings; optimizers over the same parameters share the group. A
  *bucket* is some of them, reduced together (what users call a group of `groups=`).
- A *pass* is one `backward()` that accumulated into a slot's `.grad`. Each group counts its own.
  The pass that makes a group *due* (number `passes_per_step` since its last reduction) reduces it.
- A *round* is the one meeting of all ranks of a process set, at the end of a due pass.

In a due pass, a hook that runs right after a `.grad` was accumulated launches the in-place
allreduce of that gradient, so communication overlaps with the rest of the pass. Ordinary gradients
are dealt with by native hooks (csrc/bind/gradient_hooks.h) in joint buckets (gradient_buckets.py);
what comes to Python is the first gradient of a pass and whatever is unusual. At the end of the pass
(an autograd engine callback, so still inside `backward()`) the round launches what only other
ranks have launched, as zeros if nothing was accumulated here, and waits for everything. When
`backward()` returns, `.grad` is the reduced gradient on every rank. How that works is in
gradient_launches.py and gradient_rounds.py; this file is about parameters, hooks and passes.

Note [What ranks must agree on]
    Which slots fire, and in which order, may differ between ranks. The number of rounds may not:
    every due pass is a round, and `step()` holds one if none has covered its parameters since the
    last step, so that a rank whose loss did not depend on them meets the ranks whose loss did. A
    round covers all groups of a process set, since ranks may differ in which groups they reached.
    And nothing that ranks must agree on may depend on when Python collects an object.

    Different process sets have rounds of their own: a pass holds one in each set whose parameters
    it reached, all at the same time. (It must not hold one in the others: a rank may run a pass
    over one set's parameters that ranks outside that set do not run.) A rank whose loss did not
    reach a set is met in the `step()` of that set's optimizer, to which it comes if it is not
    waiting, itself, for a rank that waits for it: a cycle of ranks that each reached a set the next
    one did not, and did not reach one that the previous one did, would wait for ever.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from . import _C
from .gradient_groups import Bucket, Group, Settings, Slot
from .gradient_launches import CLEAN, HELD, LAUNCHED, SPARSE, TWICE, WAITING
from .gradient_rounds import Rounds, hold
from .process_sets import ProcessSet

_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback


class GradientReducer:
    """All groups of this process, and the pass that is going on."""

    def __init__(self) -> None:
        self._rounds: dict[ProcessSet, Rounds] = {}
        self._task = -1  # the engine's number of the backward() that is running, as far as known
        self._open: dict[int, int] = {}  # numbers of those whose end is awaited, and their threads
        self._overtaken: set[int] = set()  # those in another thread than the pass that just ended
        _C.on_gradient(self._before, self._after)

    # -- Wrapping ---------------------------------------------------------------------------------

    def add(
        self,
        owner: str,
        parameters: Sequence[tuple[str, Tensor]],
        settings: Settings,
        group: Group | None = None,
        buckets: Iterable[Iterable[Tensor]] = (),
    ) -> list[Slot]:
        """Reduce these (name, parameter) pairs; returns their slots, in order, new or shared.

        New slots go into `group`, or into a new group, those of one of the `buckets` into a bucket.
        (A slot that is shared stays as it is.) Names that were used before get the first
        free prefix of "optimizer1.", "optimizer2.", ... Raises ValueError for a parameter that is
        reduced with other settings already.
        """
        known = self._known()
        if any(id(parameter) in known for _, parameter in parameters):
            # An optimizer that nobody can reach must not count: on other ranks it may be gone.
            gc.collect()
            known = self._known()
        fresh: dict[int, tuple[str, Tensor]] = {}
        for name, parameter in parameters:
            slot = known.get(id(parameter))
            if slot is None:
                fresh[id(parameter)] = (name, parameter)
            elif slot.group.settings != settings:
                raise ValueError(
                    f"parameter {name!r} of {owner} is already reduced for {slot.group.owner} with "
                    f"other settings ({slot.group.settings} there, {settings} here): use the same "
                    "settings, or let go of the first optimizer"
                )
        if fresh:
            rounds = self._rounds.setdefault(settings.process_set, Rounds(settings.process_set))
            scope = _scope(rounds.names, [name for name, _ in fresh.values()])
            group = group or Group(owner, settings)
            if group not in rounds.groups:
                rounds.groups.append(group)
            # One bucket's slots stand beside each other.
            for bucket in buckets:
                members = [fresh.pop(id(each)) for each in bucket if id(each) in fresh]
                slots = [group.add(scope + name, each) for name, each in members]
                known |= {id(each): slot for (_, each), slot in zip(members, slots, strict=True)}
                if len(slots) > 1:
                    group.buckets.append(Bucket(len(group.buckets), slots))
            for name, parameter in fresh.values():
                known[id(parameter)] = group.add(scope + name, parameter)
            rounds.groups_changed()
        return [known[id(parameter)] for _, parameter in parameters]

    def _known(self) -> dict[int, Slot]:
        """The slots by id of their parameter."""
        slots = (slot for group in self._groups() if group.alive for slot in group.slots)
        return {id(slot.parameter()): slot for slot in slots if slot.parameter() is not None}

    def _groups(self) -> Iterator[Group]:
        return (group for rounds in self._rounds.values() for group in rounds.groups)

    def _of(self, group: Group) -> Rounds:
        return self._rounds[group.settings.process_set]

    def configure(self, group: Group, settings: Settings) -> None:
        group.configure(settings)
        self._of(group).groups_changed()

    def reset(self) -> None:
        """The job has ended. Optimizers stay wrapped, for the next one."""
        for rounds in self._rounds.values():
            rounds.reset()
        self._rounds = {key: rounds for key, rounds in self._rounds.items() if rounds.groups}
        _C.forget_gradient_memory()
        self._task = -1
        self._open.clear()

    def release_gradients(self) -> None:
        """Before `.grad` is written: take out what a failed backward() has left in flight."""
        for rounds in self._rounds.values():
            rounds.launches.release_gradients()

    # -- Hooks: called by the native ones for what is not ordinary ---------------------------------

    def _before(self, group: Group, index: int) -> None:
        """Something is about to be accumulated where a reduction is in flight, or was separate."""
        launches = self._of(group).launches
        launches.adopt()
        launches.set_aside(group.slots[index])

    def _after(self, group: Group, index: int) -> None:
        """A gradient was accumulated."""
        task = _graph_task_id()
        if task != self._task:
            self._enter(task)
        group.hooks.fired = True
        slot, launches = group.slots[index], self._of(group).launches
        if slot.handle is None and group.marks[index] == LAUNCHED:
            launches.adopt()
        if slot.handle is not None:
            group.marks[index] = TWICE
        elif group.passes + 1 < group.passes_per_step:
            group.marks[index] = HELD
        else:
            slot.position = launches.positions = launches.positions + 1
            launches.offer(slot, slot.gradient())  # type: ignore[arg-type]

    # -- Passes -----------------------------------------------------------------------------------

    def _enter(self, task: int) -> None:
        """A slot fired in another backward() than the last one did."""
        if task in self._overtaken:
            raise _overlapping()
        self._task = task
        for rounds in self._rounds.values():
            rounds.launches.entered(task)
            for group in rounds.groups:
                group.hooks.open(task, group.passes + 1 >= group.passes_per_step)
        if task not in self._open:
            self._open[task] = threading.get_ident()
            _queue_callback(lambda: self._leave(task))

    def _leave(self, task: int) -> None:
        """The engine has finished a backward()."""
        self._task = -1
        thread = self._open.pop(task, None)
        if task in self._overtaken:
            self._overtaken.discard(task)
            raise _overlapping()
        node = _current_node()
        if node is not None:
            # A node of another backward() called this one (a reentrant checkpoint). The pass ends
            # with the outer one, which is the current one again as soon as that node is done.
            def resume(*_: Any) -> None:
                handle.remove()
                self._enter(_graph_task_id())

            handle = node.register_hook(resume)
            return
        # What else is open was abandoned by an exception, or runs in another thread of the user's.
        # (Threads of the engine do not count: several of them work on one backward().)
        for other, its_thread in self._open.items():
            if its_thread != thread and {thread, its_thread} <= _python_threads():
                self._overtaken.add(other)
        self._open.clear()
        self._end_pass(task)

    def _end_pass(self, task: int) -> None:
        _C.end_of_pass()
        due: list[tuple[Rounds, list[Slot]]] = []
        for rounds in self._rounds.values():
            reached = False
            left = rounds.launches.left_over(task)
            for group in rounds.groups:
                if group.hooks.fired:
                    group.hooks.fired = False
                    if group.passes + 1 < group.passes_per_step:
                        group.passes += 1
                    else:
                        reached = True
                        rounds.launches.launch_held(group)
            if reached:
                due.append((rounds, left))
        if due:
            hold(due)

    def flush(self, groups: Sequence[Group], meet: bool) -> None:
        """Reduce what is accumulated and unreduced in these groups, all of one process set.

        With `meet`, hold a round also if there is nothing, but no round has covered one of the
        groups since the last step: Note [What ranks must agree on]. Gradients in such a group are
        none of ours: they were put there by hand, and are reduced as well.
        """
        if not groups:
            return
        needed, rounds = False, self._of(groups[0])
        self.refresh(groups)
        left = rounds.launches.unfinished()
        for group in groups:
            if any(group.marks):
                needed = True
                rounds.launches.launch_held(group)
            elif meet and not group.met:
                needed = True
                rounds.launches.launch_given(group)
        if needed:
            hold([(rounds, left)])

    def forget(self, groups: Iterable[Group], slots: Iterable[Slot]) -> None:
        """What these slots accumulated will not be reduced; the count of passes starts anew."""
        for group in groups:
            if not group.passes and not any(group.marks):
                continue
            for slot in slots:
                if slot.group is group and group.marks[slot.index] in (HELD, WAITING, SPARSE):
                    if slot.joint is not None and group.marks[slot.index] == WAITING:
                        self._of(group).launches.dropped(slot)
                    group.marks[slot.index] = CLEAN
                    slot.aside = None
            if HELD not in group.marks:
                group.passes = 0

    def realign(self) -> None:
        """All ranks have joined, perhaps after different numbers of passes: count them anew.

        What was accumulated and not reduced belongs to the next reduction.
        """
        for group in self._groups():
            group.passes = 0
            group.met = False
        for rounds in self._rounds.values():
            rounds.groups_changed()  # joined ranks do not know how the others' buckets changed

    def refresh(self, groups: Iterable[Group]) -> None:
        """To be called before a pass: hook parameters that were converted to another type."""
        for group in groups:
            if group.hooks.refresh():
                self._of(group).groups_changed()


def _scope(used: set[str], names: list[str]) -> str:
    """The first free prefix for names."""
    scope, number = "", 0
    while any(scope + name in used for name in names):
        number += 1
        scope = f"optimizer{number}."
    used.update(scope + name for name in names)
    return scope


def _python_threads() -> set[int | None]:
    """Threads started by Python, as opposed to those of the autograd engine."""
    dummy = threading._DummyThread
    return {thread.ident for thread in threading.enumerate() if not isinstance(thread, dummy)}


def _overlapping() -> RuntimeError:
    return RuntimeError(
        "two threads ran backward() at the same time on parameters of a DistributedOptimizer, so "
        "the ranks cannot tell which gradients belong together: run one backward() after the other"
    )
