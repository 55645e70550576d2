"""Making ranks equal: the parameters and the optimizer state of one rank on all.

Before tensors move, the ranks compare what they hold, and raise the same error if it differs: no
rank waits for a tensor that another one does not have.

An optimizer's state is sent as a skeleton, the pickle of all its options and state in which every
tensor is replaced by a `_Slot`, followed by the tensors themselves in one batch. So it may be
nested in any way and hold anything, and whatever rank it is missing on gets it without ever
running a step.

(A module of this package must not be called `broadcast`: importing it would hide `hvd.broadcast`.)
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from .collective_arguments import rank_of_root
from .collectives import broadcast_async_, synchronize
from .objects import Pickler, agree, broadcast_bytes, differing
from .operation import Handle, check_tensor, overlaps_itself
from .process_sets import global_process_set

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

_Named = tuple[str | None, Tensor]


# ----------------------------------------------------------------------------------------------
# Parameters


def broadcast_parameters(
    params: Mapping[str, Tensor] | list[Any] | Iterator[Any], root_rank: int
) -> None:
    """Overwrite the given tensors on every rank with those of `root_rank`, in place.

    `params` is a dict such as `model.state_dict()`, or a list or iterator of `(name, tensor)`
    pairs, such as `model.named_parameters()`, or of tensors. All of them are in flight at once.

    Raises ValueError or TypeError for anything else, for a value that is no tensor and for
    duplicate names; ValueError with the same text on every rank if the names, shapes or dtypes
    differ between ranks, or if a rank raised.
    """
    entries: list[_Named] = []
    problem: Exception | None = None
    try:
        rank_of_root(root_rank, global_process_set, "broadcast_parameters")
        entries = _named_tensors(params)
    except (TypeError, ValueError) as caught:
        problem = caught
    description: Any = [
        (name or f"number {i}", str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for i, (name, tensor) in enumerate(entries)
    ]
    if problem is not None:
        description = f"{type(problem).__name__}: {problem}"
    everyones = differing(description, "broadcast_parameters")
    if problem is not None:
        raise problem
    if everyones is not None:
        raise ValueError("broadcast_parameters: " + _explain_tensors(everyones))
    _wait_all([broadcast_async_(tensor, root_rank, name) for name, tensor in entries])


def _named_tensors(params: Any) -> list[_Named]:
    if isinstance(params, Mapping):
        items = sorted(params.items())
    elif isinstance(params, list | Iterator):
        items = [(None, item) if isinstance(item, Tensor) else item for item in params]
    else:
        raise ValueError(
            "broadcast_parameters takes a dict, or a list or iterator of tensors or (name, tensor) "
            f"pairs, not {type(params).__name__}"
        )
    seen: set[str] = set()
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            raise ValueError(
                f"broadcast_parameters: expected a tensor or a (name, tensor) pair, got {item!r}"
            )
        name, tensor = item
        if name is not None and not isinstance(name, str):
            raise TypeError(f"broadcast_parameters: names must be strings, not {name!r}")
        check_tensor(tensor, f"broadcast_parameters: {name!r}", in_place=True)
        if name in seen:
            raise ValueError(f"broadcast_parameters: {name!r} is given twice")
        if name is not None:
            seen.add(name)
    return items


def _explain_tensors(everyones: list[Any]) -> str:
    """Which tensors differ between the ranks, and how."""
    failed = _failures(everyones)
    if failed:
        return failed
    held: dict[str, dict[str, list[int]]] = {}
    for rank, description in enumerate(everyones):
        for name, dtype, shape in description:
            held.setdefault(name, {}).setdefault(f"{dtype} {shape}", []).append(rank)
    size = len(everyones)
    lines = []
    for name, forms in held.items():
        missing = sorted(set(range(size)).difference(*forms.values()))
        texts = [f"{form} on ranks {ranks}" for form, ranks in forms.items()]
        if missing or len(texts) > 1:
            lines.append(
                f"{name!r} is " + ", ".join(texts + [f"missing on ranks {missing}"] * bool(missing))
            )
    more = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
    if not lines:
        return "the ranks give the same tensors in different orders; give them names, or one order"
    return "the ranks do not hold the same tensors: " + "; ".join(lines[:10] + more)


def _failures(everyones: list[Any]) -> str:
    """Of ranks that say, instead of a description, what they raise."""
    return "; ".join(
        f"rank {r} raised {text}" for r, text in enumerate(everyones) if isinstance(text, str)
    )


def _wait_all(handles: list[Handle]) -> None:
    """Synchronize all, then raise the first failure: nothing is left in flight behind an error."""
    failure: Exception | None = None
    for handle in handles:
        try:
            synchronize(handle)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


# ----------------------------------------------------------------------------------------------
# Optimizer state


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Make the optimizer's options and state on every rank equal to those of `root_rank`.

    Works for any optimizer, wrapped or not, and for any state. Every option of every param group
    (lr, betas, ...) is set, and the state of every parameter is replaced; tensors that match in
    dtype and shape are overwritten in place. Parameters and gradients are not touched and no step
    is run. State that does not exist on the root is removed, options that do not exist there stay.
    `model` is accepted for scripts written for Horovod and is not needed.

    Raises TypeError for what is no optimizer or no rank; ValueError with the same text on every
    rank if the ranks' optimizers differ in class or in the sizes of their param groups, or if a
    rank raised; RuntimeError with the same text on every rank if the root's
    state cannot be pickled or a rank cannot rebuild it.
    """
    name = "broadcast_optimizer_state"
    problem: Exception | None = None
    mine: Any = None
    root = 0
    try:
        root = rank_of_root(root_rank, global_process_set, name)
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
            raise TypeError(
                f"{name}: optimizer must be a torch.optim.Optimizer, not {optimizer!r}; for a "
                "model's parameters call hvd.broadcast_parameters()"
            )
        groups = optimizer.param_groups
        mine = (type(optimizer).__name__, [len(group["params"]) for group in groups])
    except (TypeError, ValueError) as caught:
        problem = caught
        mine = f"{type(caught).__name__}: {caught}"
    everyones = differing(mine, name)
    if problem is not None:
        raise problem
    if everyones is not None:
        failed = _failures(everyones)
        if failed:
            raise ValueError(f"{name}: {failed}")
        held: dict[str, list[int]] = {}
        for rank, (kind, sizes) in enumerate(everyones):
            held.setdefault(f"{kind} with param groups of {sizes} parameters", []).append(rank)
        texts = [f"{what} on ranks {ranks}" for what, ranks in held.items()]
        raise ValueError(f"{name}: the optimizers differ: " + ", ".join(texts))

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_root = root == global_process_set.rank()
    payload: memoryview | None = None
    tensors: list[Tensor] = []
    skeleton: Any = None
    error: Exception | None = None
    if is_root:
        try:
            payload, tensors = _dump(_contents(optimizer, parameters), parameters)
        except Exception as caught:
            error = caught
    data = broadcast_bytes(payload, root_rank, name, global_process_set)
    if data is not None and not is_root:
        try:
            skeleton, tensors = _load(data, _contents(optimizer, parameters), parameters)
        except Exception as caught:
            error = caught
    agree(error, name, name, global_process_set)
    _wait_all(
        [broadcast_async_(tensor, root_rank, f"{name}.{i}") for i, tensor in enumerate(tensors)]
    )
    if not is_root:
        _assign(optimizer, parameters, skeleton)


# All of an optimizer but its parameters, which are known by their number: "options" by param group,
# "state" by parameter, "other" state under keys that are no parameters.
_Contents = dict[str, Any]


def _contents(optimizer: Optimizer, parameters: list[Tensor]) -> _Contents:
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    state = optimizer.state.items()
    return {
        "options": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "state": {number[id(k)]: v for k, v in state if id(k) in number},
        "other": {k: v for k, v in state if not isinstance(k, Tensor)},
    }


def _assign(optimizer: Optimizer, parameters: list[Tensor], received: _Contents) -> None:
    for group, options in zip(optimizer.param_groups, received["options"], strict=True):
        group.update(options)
    state = {parameters[i]: value for i, value in received["state"].items()} | received["other"]
    for key in list(optimizer.state):
        if key not in state:
            del optimizer.state[key]
    for key, value in state.items():
        current = optimizer.state.get(key)
        if type(current) is dict and type(value) is dict:
            current.clear()
            current.update(value)
        else:
            optimizer.state[key] = value


_Path = tuple[Any, ...]  # keys and indices that lead to a value in nested dicts, lists and tuples


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A tensor's place in the skeleton: all of it but its values."""

    index: int  # in the order of sending
    path: _Path  # in the contents; () inside of something else
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device_type: str
    requires_grad: bool

    def fits(self, tensor: object) -> TypeGuard[Tensor]:
        return (
            _is_plain(tensor)
            and (tensor.dtype, tuple(tensor.shape)) == (self.dtype, self.shape)
            and tensor.device.type == self.device_type
            and tensor.requires_grad == self.requires_grad
            and _is_writable(tensor)
        )

    def allocate(self, parameters: list[Tensor]) -> Tensor:
        """A tensor without values, on the device of the parameter it belongs to."""
        owners = parameters
        if self.path[:1] == ("state",):
            owners = [parameters[self.path[1]], *parameters]
        devices = [owner.device for owner in owners if owner.device.type == self.device_type]
        return torch.empty_strided(
            self.shape,
            self.stride,
            dtype=self.dtype,
            device=devices[0] if devices else self.device_type,
            requires_grad=self.requires_grad,
        )


def _is_plain(tensor: object) -> TypeGuard[Tensor]:
    """Whether a tensor travels as its bytes; others (sparse, subclasses) are pickled."""
    return (
        isinstance(tensor, Tensor)
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )


def _is_writable(tensor: Tensor) -> bool:
    return not (overlaps_itself(tensor) or tensor.is_conj() or tensor.is_neg())


def _find_tensors(value: Any, path: _Path, found: dict[int, _Path]) -> None:
    """Record the path to every tensor by its id."""
    if isinstance(value, Tensor):
        found.setdefault(id(value), path)
    elif isinstance(value, dict):
        for key, item in value.items():
            _find_tensors(item, (*path, key), found)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _find_tensors(item, (*path, i), found)


def _at(value: Any, path: _Path) -> Any:
    """What the path leads to, None if it leads nowhere."""
    for key in path:
        try:
            value = value[key]
        except (LookupError, TypeError):
            return None
    return value


def _dump(contents: _Contents, parameters: list[Tensor]) -> tuple[memoryview, list[Tensor]]:
    """The skeleton, and the tensors in the order of their slots."""
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    paths: dict[int, _Path] = {}
    _find_tensors(contents, (), paths)
    slots: dict[int, _Slot] = {}
    tensors: list[Tensor] = []
    kept: list[Tensor] = []  # ids are only unique among living objects

    class SkeletonPickler(Pickler):
        def persistent_id(self, obj: Any) -> int | _Slot | None:
            if id(obj) in number:
                return number[id(obj)]  # the receiver has its own
            if not _is_plain(obj):
                return None
            if id(obj) not in slots:
                kept.append(obj)
                tensors.append(obj if _is_writable(obj) else obj.detach().clone().contiguous())
                slots[id(obj)] = _Slot(
                    index=len(slots),
                    path=paths.get(id(obj), ()),
                    dtype=obj.dtype,
                    shape=tuple(obj.shape),
                    stride=torch.empty_like(obj, device="meta").stride(),  # dense, same order
                    device_type=obj.device.type,
                    requires_grad=obj.requires_grad,
                )
            return slots[id(obj)]

    stream = io.BytesIO()
    SkeletonPickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(contents)
    return stream.getbuffer(), tensors


def _load(
    data: memoryview, local: _Contents, parameters: list[Tensor]
) -> tuple[_Contents, list[Tensor]]:
    """The root's contents with tensors still to be filled, and those tensors in order of slots.

    A tensor that this rank has in the same place is used again if it matches.
    """
    tensors: dict[int, Tensor] = {}
    taken = {id(parameter) for parameter in parameters}  # parameters are not to be overwritten

    class SkeletonUnpickler(pickle.Unpickler):
        def persistent_load(self, pid: int | _Slot) -> Tensor:
            if isinstance(pid, int):
                return parameters[pid]
            if pid.index not in tensors:
                mine = _at(local, pid.path)
                if not pid.fits(mine) or id(mine) in taken:
                    mine = pid.allocate(parameters)
                taken.add(id(mine))
                tensors[pid.index] = mine
            return tensors[pid.index]

    contents: _Contents = SkeletonUnpickler(io.BytesIO(data)).load()
    return contents, [tensors[i] for i in range(len(tensors))]
