"""`DistributedOptimizer`: an optimizer whose gradients are averaged over the ranks.

The user's optimizer object is given a subclass of its own class in place, so its state, defaults,
param groups, hooks and schedulers stay what they are. The gradients are reduced while `backward()`
runs (see gradient_reducer.py). What is left to the optimizer is `step()`: it reduces what passes
that were not due have left over. That happens in torch's own step hooks rather than in an
overridden `step`, because learning-rate schedulers replace `step` on the instance.
"""

from __future__ import annotations

import copyreg
import functools
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import basics
from .collectives import Adasum, Average, Max, Min, Product, Sum
from .compression import Compression
from .gradient_groups import Group, Lease, Settings, Slot
from .gradient_reducer import GradientReducer
from .process_sets import ProcessSet, global_process_set

_reducer = GradientReducer(process_set=0)
basics.on_shutdown(_reducer.reset)

_STATE = "_hvdtorch"  # the one attribute a wrapped optimizer has more


class _Wrapping:
    """What a wrapped optimizer remembers."""

    def __init__(self, base: type, names: dict[Tensor, str], settings: Settings) -> None:
        self.base = base  # the optimizer's class before
        self.names = names  # as given; of more parameters than the optimizer's, perhaps
        self.settings = settings
        self.slots: list[Slot] = []  # of the optimizer's parameters; empty at size 1
        self.groups: list[Group] = []  # those of the slots, each once
        self.leases: list[Lease] = []
        self.own: Group | None = None  # where parameters that are added later go
        self.synchronized = False  # synchronize() was called since the last step()
        self.skipping = False  # inside skip_synchronize()

    def reduce(self, owner: str, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Have these parameters reduced, too. Raises ValueError, see `GradientReducer.add`."""
        slots = _reducer.add(owner, parameters, self.settings, self.own)
        self.slots += slots
        for slot in slots:
            if slot.group not in self.groups:
                self.groups.append(slot.group)
                self.leases.append(slot.group.lease())
            if slot.group.owner == owner:
                self.own = slot.group

    def before_step(self, has_closure: bool) -> None:
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
        for group in self.groups:
            group.met = True  # if step() calls another step(), as some subclasses do

    def after_step(self) -> None:
        self.synchronized = False
        for group in self.groups:
            group.met = False


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wrapping: _Wrapping | None = vars(optimizer).get(_STATE)
    if wrapping is not None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        wrapping.before_step(has_closure=closure is not None)


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wrapping: _Wrapping | None = vars(optimizer).get(_STATE)
    if wrapping is not None:
        wrapping.after_step()


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
        since the last reduction when `backward_passes_per_step` is more than 1. All ranks must call
        this equally often.
        """
        wrapping = self._hvdtorch
        _reducer.flush(wrapping.groups, meet=not wrapping.synchronized)
        for group in wrapping.groups:
            group.met = True
        wrapping.synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step()` reduces nothing: for after an explicit `synchronize()`."""
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
        wrapping.settings = wrapping.settings._replace(passes_per_step=_positive(passes))
        for group in wrapping.groups:
            _reducer.configure(group, wrapping.settings)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; accumulated gradients that were not reduced yet are dropped."""
        wrapping = self._hvdtorch
        if wrapping.groups:
            _reducer.release_gradients()
            _reducer.forget(wrapping.groups, wrapping.slots)
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the new parameters' gradients are reduced like the others."""
        super().add_param_group(param_group)
        wrapping = self._hvdtorch
        index = len(self.param_groups) - 1
        try:
            if wrapping.slots or basics.size() > 1:
                parameters = list(_named(self, wrapping.names, groups=[index]))
                wrapping.reduce(_owner(self), parameters)
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
        return False

    @property
    def process_set(self) -> ProcessSet:
        return global_process_set

    # Private, and yet read by tools and tests written for Horovod.

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in _named(self, self._hvdtorch.names)}

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
    attributes = {
        "__module__": __name__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (_DistributedOptimizer, base), attributes)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _DistributedOptimizer:
    """Make `optimizer` step on gradients that are reduced over all ranks.

    The optimizer is changed in place and returned: its class becomes a subclass of what it was,
    with the same name; state, defaults, param groups and schedulers are kept. When `backward()`
    returns, `.grad` of every parameter is the reduced gradient, so clipping, unscaling and a plain
    `step()` all see the same values on every rank. A parameter that only some ranks' losses depend
    on counts as zero on the others; where no rank used it, `.grad` stays None. If there was no
    `backward()` since the last step, `step()` reduces the gradients that were assigned by hand.

    All ranks must wrap the same parameters in the same order, and run the same number of
    `backward()` passes between two steps, from one thread at a time. At size 1 the optimizer
    behaves as before.

    Copies and pickles of the result are plain optimizers that reduce nothing.

    Parameters
    ----------
    optimizer
        Any torch optimizer.
    named_parameters
        (name, parameter) pairs, such as `model.named_parameters()`; may contain parameters that the
        optimizer does not have. The gradient of a parameter is reduced under the name
        "allreduce.<name>", which timelines and error texts show. Without it the names are
        "noname.<group>.<index>". Names an earlier optimizer used get a prefix "optimizer1.".
    compression
        `hvd.Compression.none`, `.fp16`, `.bf16`, or any object with the same two methods.
    backward_passes_per_step
        Passes to accumulate locally (a sum, not a mean) before one reduction. A `step()` or
        `synchronize()` before that reduces what there is.
    op
        Average, Sum, Min, Max or Product, over the ranks.
    gradient_predivide_factor
        f: with op=Average, scale by 1/f before the sum over P ranks, and by f/P after it.
    num_groups, groups, sparse_as_dense, process_set
        Only their defaults are supported yet.

    Returns
    -------
    The optimizer, with `synchronize()`, `skip_synchronize()` and `set_backward_passes_per_step(n)`.

    Raises
    ------
    ValueError
        Names that are no (name, parameter) tuples, repeated, or missing for a parameter of the
        optimizer; an optimizer that is wrapped already; a parameter that is reduced with other
        settings for another optimizer; `backward_passes_per_step` not positive; a predivide factor
        with another op than Average; hvdtorch not initialised.
    NotImplementedError
        Arguments that are not supported yet.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} optimizer is a DistributedOptimizer already"
        )
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
    unsupported = {
        "op=Adasum": op == Adasum,
        "groups": groups is not None or num_groups != 0,
        "sparse_as_dense": bool(sparse_as_dense),
        "process_set": process_set is not global_process_set,
    }
    for what, given in unsupported.items():
        if given:
            raise NotImplementedError(f"DistributedOptimizer: {what} is not supported yet")
    if op not in (Average, Sum, Min, Max, Product):
        raise ValueError(f"op must be one of hvd.Average, Sum, Min, Max, Product, not {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(
            f"gradient_predivide_factor must be positive, not {gradient_predivide_factor}"
        )
    passes = _positive(backward_passes_per_step)
    settings = Settings(op, compression, passes, float(gradient_predivide_factor))
    names = _checked_names(optimizer, named_parameters)
    wrapping = _Wrapping(type(optimizer), names, settings)
    if basics.size() > 1:
        wrapping.reduce(_owner(optimizer), list(_named(optimizer, names)))
    base: type = type(optimizer)
    optimizer.__class__ = _wrapped_class(base)
    setattr(optimizer, _STATE, wrapping)
    _hook_step(optimizer)
    assert isinstance(optimizer, _DistributedOptimizer)
    return optimizer


def _positive(passes: int) -> int:
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be positive, not {passes}")
    return passes


def _owner(optimizer: Any) -> str:
    return f"the {type(optimizer).__name__} optimizer at 0x{id(optimizer):x}"


def _checked_names(optimizer: Any, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Parameter to name. Of two names of one parameter (tied weights) the first counts."""
    pairs = list(named) if named is not None else []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(
                "named_parameters must be (name, parameter) tuples, as model.named_parameters() "
                f"gives; one entry is of type {type(pair).__name__}"
            )
    seen: set[str] = set()
    repeated = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if repeated:
        raise ValueError(
            f"named_parameters has more than one parameter named {', '.join(map(repr, repeated))}: "
            "give each a name of its own, such as the model's name and a dot before it"
        )
    names: dict[Tensor, str] = {}
    for name, parameter in pairs:
        names.setdefault(parameter, name)
    if pairs:
        unnamed = [
            f"number {index} of group {group} (shape {list(parameter.shape)})"
            for group, index, parameter in _numbered(optimizer)
            if parameter not in names
        ]
        if unnamed:
            raise ValueError(
                f"named_parameters lacks {len(unnamed)} of the optimizer's parameters: "
                f"{', '.join(unnamed[:5])}{', ...' if len(unnamed) > 5 else ''}"
            )
    return names


def _numbered(optimizer: Any) -> Iterator[tuple[int, int, Tensor]]:
    """(group, index in it, parameter) for each of the optimizer's parameters, once."""
    seen: set[int] = set()
    for group, options in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(options["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield group, index, parameter


def _named(
    optimizer: Any, names: dict[Tensor, str], groups: Iterable[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) for the optimizer's parameters, or for those of some of its groups."""
    for group, index, parameter in _numbered(optimizer):
        if groups is None or group in groups:
            yield names.get(parameter, f"noname.{group}.{index}"), parameter


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
