"""`DistributedOptimizer`: an optimizer whose gradients are averaged over the ranks.

The user's optimizer object is given a subclass of its own class in place, so its state, defaults,
param groups, hooks and schedulers stay what they are. The gradients are reduced while `backward()`
runs (see gradient_reducer.py). What is left to the optimizer is `step()`: it reduces what passes
that were not due have left over. That happens in torch's own step hooks rather than in an
overridden `step`, because learning-rate schedulers replace `step` on the instance. With op=Adasum
there is no reduction of gradients but one of what `step()` does: see adasum_step.py.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import basics, presence
from .adasum_step import AdasumStep
from .collective_arguments import check_compressor
from .compression import Compression
from .gradient_groups import Group, Lease, Settings, Slot
from .gradient_reducer import GradientReducer
from .operation import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM
from .optimizer_arguments import (
    check_optimizer,
    check_registered,
    checked_buckets,
    checked_names,
    named,
    positive,
    predivide_factor,
)
from .process_sets import ProcessSet, global_process_set

_reducer = GradientReducer()
basics.on_shutdown(_reducer.reset)
presence.on_join(_reducer.realign)

_STATE = "_hvdtorch"  # the one attribute a wrapped optimizer has more


class _Wrapping:
    """What a wrapped optimizer remembers."""

    def __init__(self, base: type, names: dict[Tensor, str], settings: Settings) -> None:
        self.base = base  # the optimizer's class before
        self.names = names  # as given; of more parameters than the optimizer's, perhaps
        self.settings = settings
        # Whether there is anybody to reduce with; if not, the optimizer is as it was.
        self.shared = settings.process_set.included() and (settings.process_set.size() or 1) > 1
        self.adasum: AdasumStep | None = None
        if self.shared and settings.op == ADASUM:
            self.adasum = AdasumStep(settings.process_set, settings.compression)
        self.slots: list[Slot] = []  # of the optimizer's parameters
        self.groups: list[Group] = []  # those of the slots, each once
        self.leases: list[Lease] = []
        self.own: Group | None = None  # where parameters that are added later go
        self.synchronized = False  # synchronize() was called since the last step()
        self.skipping = False  # inside skip_synchronize()
        self.stepping: types.FrameType | None = None  # the outermost step() that is running

    def reduce(
        self,
        owner: str,
        parameters: Sequence[tuple[str, Tensor]],
        buckets: Iterable[Iterable[Tensor]] = (),
    ) -> None:
        """Have these parameters reduced, too. Raises ValueError, see `GradientReducer.add`."""
        if not self.shared or self.adasum is not None:
            return
        slots = _reducer.add(owner, parameters, self.settings, self.own, buckets)
        self.slots += slots
        for slot in slots:
            if slot.group not in self.groups:
                self.groups.append(slot.group)
                self.leases.append(slot.group.lease())
            if slot.group.owner == owner:
                self.own = slot.group

    def before_step(self, optimizer: Any, has_closure: bool) -> None:
        if self.adasum is not None:
            self.adasum.begin(named(optimizer, self.names))
            return
        if self.skipping or not self.groups:
            return
        if self.synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after "
                "optimizer.synchronize(). Nothing is reduced twice here, but a script that is also "
                "to run on Horovod should call step() inside `with optimizer.skip_synchronize():`.",
                stacklevel=4,
            )
        # The backward() inside a closure meets the other ranks by itself.
        _reducer.flush(self.groups, meet=not (has_closure or self.synchronized))

    def after_step(self) -> None:
        if self.adasum is not None:
            self.adasum.finish()
        self.synchronized = False
        for group in self.groups:
            group.met = False


# The two hooks see the step() of every class whose step() calls that of its base, and only the
# outermost counts. It is known by the frame that calls the hooks: a counter would be wrong for ever
# after a step() that raised.


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wrapping: _Wrapping | None = vars(optimizer).get(_STATE)
    if wrapping is None or _is_running(wrapping.stepping):
        return
    wrapping.stepping = sys._getframe(1)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    wrapping.before_step(optimizer, has_closure=closure is not None)


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wrapping: _Wrapping | None = vars(optimizer).get(_STATE)
    if wrapping is None or wrapping.stepping is not sys._getframe(1):
        return
    wrapping.stepping = None
    wrapping.after_step()


def _is_running(frame: types.FrameType | None) -> bool:
    """Whether the caller was called, perhaps indirectly, from this frame."""
    caller: types.FrameType | None = sys._getframe(1)
    while frame is not None and caller is not None and caller is not frame:
        caller = caller.f_back
    return frame is not None and caller is frame


_STEP_HOOKS = {
    "_optimizer_step_pre_hooks": _before_step,
    "_optimizer_step_post_hooks": _after_step,
}


if TYPE_CHECKING:
    _Optimizer = torch.optim.Optimizer
else:
    _Optimizer = object


class _DistributedOptimizer(_Optimizer):
    """What a wrapped optimizer can do besides. See the function `DistributedOptimizer`."""

    _hvdtorch: _Wrapping

    def synchronize(self) -> None:
        """Reduce what was accumulated and not reduced yet; in the ordinary case there is nothing.

        Ordinarily `backward()` has reduced the gradients when it returns. Left over are the passes
        since the last reduction when `backward_passes_per_step` is more than 1. All ranks of the
        process set must call this equally often. Does nothing with op=Adasum, which reduces no
        gradients.
        """
        wrapping = self._hvdtorch
        _reducer.flush(wrapping.groups, meet=not wrapping.synchronized)
        for group in wrapping.groups:
            group.met = True
        wrapping.synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step()` reduces no gradients: for after an explicit `synchronize()`."""
        self._hvdtorch.skipping = True
        try:
            yield
        finally:
            self._hvdtorch.skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on reduce every `passes` backward passes. All ranks must call it together.

        Optimizers that share parameters with this one share the setting. Raises ValueError if
        `passes` is not positive.
        """
        wrapping = self._hvdtorch
        wrapping.settings = wrapping.settings._replace(passes_per_step=positive(passes))
        for group in wrapping.groups:
            _reducer.configure(group, wrapping.settings)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; accumulated gradients that were not reduced yet are dropped."""
        wrapping = self._hvdtorch
        if wrapping.groups:
            _reducer.refresh(wrapping.groups)
            _reducer.release_gradients()
            _reducer.forget(wrapping.groups, wrapping.slots)
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the new parameters' gradients are reduced like the others."""
        super().add_param_group(param_group)
        wrapping = self._hvdtorch
        index = len(self.param_groups) - 1
        try:
            wrapping.reduce(_owner(self), list(named(self, wrapping.names, groups=[index])))
        except ValueError:
            del self.param_groups[index]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own; accumulated gradients that were not reduced yet will not be."""
        super().load_state_dict(state_dict)
        _reducer.forget(self._hvdtorch.groups, self._hvdtorch.slots)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the optimizer's own class: local, needing no hvdtorch."""
        reduced: tuple[Any, ...] = super().__reduce_ex__(max(2, int(protocol)))  # type: ignore[assignment]
        factory, args, state, *rest = reduced
        base = self._hvdtorch.base
        if factory is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle insists that this makes an object of the very class of `self`
            factory, args = copyreg._reconstructor, (base, object, None)  # type: ignore[attr-defined]
        args = tuple(base if argument is type(self) else argument for argument in args)
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != _STATE}
            for key, ours in _STEP_HOOKS.items():
                if key in state:
                    hooks = state[key].items()
                    state[key] = type(state[key])(
                        (id, hook) for id, hook in hooks if hook is not ours
                    )
            if hasattr(state.get("step"), _STATE):
                del state["step"]
        return (factory, args, state, *rest)

    @property
    def backward_passes_per_step(self) -> int:
        return self._hvdtorch.settings.passes_per_step

    @property
    def op(self) -> int:
        return self._hvdtorch.settings.op

    @property
    def gradient_predivide_factor(self) -> float:
        return self._hvdtorch.settings.predivide

    @property
    def sparse_as_dense(self) -> bool:
        return self._hvdtorch.settings.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        return self._hvdtorch.settings.process_set

    # Private, and yet read by tools and tests written for Horovod.

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in named(self, self._hvdtorch.names)}

    @property
    def _requires_update(self) -> set[Tensor]:
        return {parameter for parameter in self._reduced() if parameter.requires_grad}

    @property
    def _handles(self) -> dict[Tensor, tuple[Any, Any]]:
        slots = zip(self._reduced(), self._hvdtorch.slots, strict=True)
        return {p: (slot.handle, slot.context) for p, slot in slots if slot.handle is not None}

    def _reduced(self) -> list[Tensor]:
        parameters = (slot.parameter() for slot in self._hvdtorch.slots)
        return [parameter for parameter in parameters if parameter is not None]


@functools.cache
def _wrapped_class(base: type) -> type:
    """A subclass of `base` that cannot be told from it by name."""
    # Libraries look for "horovod" in the text of the class.
    known_as = sys.modules.get("horovod.torch.optimizer")
    ours = getattr(known_as, "DistributedOptimizer", None) is DistributedOptimizer
    attributes = {
        "__module__": "horovod.torch.optimizer" if ours else __name__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (_DistributedOptimizer, base), attributes)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _DistributedOptimizer:
    """Make `optimizer` step on gradients that are reduced over all ranks of `process_set`.

    The optimizer is changed in place and returned: its class becomes a subclass of what it was,
    with the same name; state, defaults, param groups and schedulers are kept. When `backward()`
    returns, `.grad` of every parameter is the reduced gradient, so clipping, unscaling and a plain
    `step()` all see the same values on every rank. A parameter that only some ranks' losses depend
    on counts as zero on the others; where no rank used it, `.grad` stays None. If there was no
    `backward()` since the last step, `step()` reduces the gradients that were assigned by hand.

    All ranks must wrap the same parameters in the same order, and run the same number of
    `backward()` passes between two steps, from one thread at a time. (Ranks that have called
    `hvd.join()` are not waited for.) At size 1 the optimizer behaves as before.

    Sparse (COO) gradients, such as those of `nn.Embedding(sparse=True)`, are reduced at the end of
    the pass, and become the coalesced sum of all ranks' entries, also on ranks that had none.

    With op=Adasum the gradients stay local, and `step()` combines what it does: each rank's own
    optimizer steps on its own gradients, with its own momentum, and the changes that the ranks made
    to each parameter are combined by Adasum and applied to the value before the step. So the
    parameters are valid at any time and equal on all ranks after a step, `zero_grad()` may come
    anywhere, and `backward_passes_per_step`, `synchronize()` and `skip_synchronize()` change
    nothing: a step works on whatever was accumulated since the last `zero_grad()`. All ranks must
    call `step()` equally often; with a GradScaler that needs an optimizer made with `fused=True`,
    since another one's step is left out on the ranks that found an infinity.

    Copies and pickles of the result are plain optimizers that reduce nothing.

    Parameters
    ----------
    optimizer
        Any torch optimizer.
    named_parameters
        (name, parameter) pairs, such as `model.named_parameters()`; may contain parameters that the
        optimizer does not have. The gradient of a parameter is reduced under the name
        `allreduce.<name>`, which timelines and error texts show. Without it the names are
        `noname.<group>.<index>`. Names an earlier optimizer used get a prefix "optimizer1.".
    compression
        `hvd.Compression.none`, `.fp16`, `.bf16`, or any object with the same two methods. Not used
        for sparse gradients.
    backward_passes_per_step
        Passes to accumulate locally (a sum, not a mean) before one reduction. A `step()` or
        `synchronize()` before that reduces what there is.
    op
        Average, Sum, Min, Max or Product, over the ranks; or Adasum. Sparse gradients have Average
        and Sum only, unless `sparse_as_dense`.
    gradient_predivide_factor
        f: with op=Average, scale by 1/f before the sum over P ranks, and by f/P after it.
    num_groups
        Deprecated name of `groups`, if that is a number.
    groups
        Gradients to reduce together, each group as one operation that starts when the last of its
        gradients is ready. An int n cuts the parameters that require a gradient into n consecutive
        groups of nearly equal number; a list of lists of parameters says what belongs together, and
        every other parameter is alone. Where no rank has the gradients of a whole group, those
        there are are reduced one by one. Not for sparse gradients. Parameters that are added later
        or are already reduced for another optimizer are not put into groups.
    sparse_as_dense
        Reduce sparse gradients as dense tensors; they become sparse again. Then a gradient may be
        sparse on some ranks and dense on others, too.
    process_set
        The ranks that reduce. On every other rank the optimizer behaves as before.

    Returns
    -------
    torch.optim.Optimizer
        The optimizer, with `synchronize()`, `skip_synchronize()` and
        `set_backward_passes_per_step(n)`.

    Raises
    ------
    ValueError
        Names that are no (name, parameter) tuples, repeated, or missing for a parameter of the
        optimizer; an optimizer that is wrapped already; a parameter that is reduced with other
        settings for another optimizer; `backward_passes_per_step` not positive; a predivide factor
        with another op than Average; a number of groups that is not positive, members of groups
        that are no parameters of the optimizer or in two groups; hvdtorch not initialised.
    TypeError
        An argument of another type than above; a process set that is not registered.

    `backward()` and `step()` raise HorovodInternalError if the ranks do not agree, a reduction
    failed, or an earlier `backward()` has raised on some ranks only; ValueError, on all ranks, for
    a sparse gradient that cannot be reduced; TypeError once the process set was removed.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} optimizer is a DistributedOptimizer already"
        )
    check_optimizer(optimizer)
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if op not in (AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT):
        raise ValueError(
            f"op must be one of hvd.Average, Sum, Adasum, Min, Max, Product, not {op!r}"
        )
    factor = predivide_factor(gradient_predivide_factor)
    if factor != 1.0 and op != AVERAGE:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    check_compressor(compression, "DistributedOptimizer")
    passes = positive(backward_passes_per_step)
    basics.size()  # raises before init()
    check_registered(process_set)
    settings = Settings(op, compression, passes, factor, bool(sparse_as_dense), process_set)
    names = checked_names(optimizer, named_parameters)
    buckets = checked_buckets(optimizer, groups)
    wrapping = _Wrapping(type(optimizer), names, settings)
    wrapping.reduce(_owner(optimizer), list(named(optimizer, names)), buckets)
    base: type = type(optimizer)
    optimizer.__class__ = _wrapped_class(base)
    setattr(optimizer, _STATE, wrapping)
    _hook_step(optimizer)
    assert isinstance(optimizer, _DistributedOptimizer)
    return optimizer


def _owner(optimizer: Any) -> str:
    return f"the {type(optimizer).__name__} optimizer at 0x{id(optimizer):x}"


def _hook_step(optimizer: Any) -> None:
    """Have `_before_step` and `_after_step` called around every step."""
    hookable = getattr(type(optimizer).step, "hooked", False)
    if hookable and all(key in vars(optimizer) for key in _STEP_HOOKS):
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_step_post_hook(_after_step)
        return
    # An optimizer that did not call torch's __init__ has no step hooks.
    step = optimizer.step

    @functools.wraps(step)
    def hooked_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        _before_step(self, (self, *args), kwargs)
        result = step(*args, **kwargs)
        _after_step(self, (self, *args), kwargs)
        return result

    setattr(hooked_step, _STATE, True)
    optimizer.step = types.MethodType(hooked_step, optimizer)
