"""The arguments of `DistributedOptimizer`: what they mean, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from numbers import Real
from typing import Any

from torch import Tensor

from .process_sets import ProcessSet


def check_optimizer(optimizer: Any) -> None:
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, or have param_groups like one, not "
            f"{optimizer!r}"
        )


def positive(passes: int) -> int:
    if not isinstance(passes, int) or isinstance(passes, bool):
        raise TypeError(f"backward_passes_per_step must be an int, not {passes!r}")
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be positive, not {passes}")
    return passes


def predivide_factor(factor: Any) -> float:
    if not isinstance(factor, Real) or isinstance(factor, bool):
        raise TypeError(f"gradient_predivide_factor must be a number, not {factor!r}")
    number = float(factor)
    if not number > 0:
        raise ValueError(f"gradient_predivide_factor must be positive, not {factor}")
    return number


def check_registered(process_set: ProcessSet) -> None:
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"process_set must be a hvd.ProcessSet, not {process_set!r}; leave it out for all ranks"
        )
    if process_set.process_set_id is None:
        raise TypeError(
            f"process_set={process_set} is not registered with the job: call "
            "hvd.add_process_set(process_set) on all ranks first"
        )


def checked_names(optimizer: Any, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
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
            for group, index, parameter in numbered(optimizer)
            if parameter not in names
        ]
        if unnamed:
            raise ValueError(
                f"named_parameters lacks {len(unnamed)} of the optimizer's parameters: "
                f"{', '.join(unnamed[:5])}{', ...' if len(unnamed) > 5 else ''}"
            )
    return names


def numbered(optimizer: Any) -> Iterator[tuple[int, int, Tensor]]:
    """(group, index in it, parameter) for each of the optimizer's parameters, once."""
    seen: set[int] = set()
    for group, options in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(options["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield group, index, parameter


def named(
    optimizer: Any, names: dict[Tensor, str], groups: Iterable[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) for the optimizer's parameters, or for those of some of its groups."""
    for group, index, parameter in numbered(optimizer):
        if groups is None or group in groups:
            yield names.get(parameter, f"noname.{group}.{index}"), parameter


def checked_buckets(optimizer: Any, groups: object) -> list[list[Tensor]]:
    """The parameters to reduce together, by bucket; what is in none of them is alone."""
    if groups is None:
        return []
    if not isinstance(groups, (int, list)) or isinstance(groups, bool):
        raise TypeError(
            f"groups must be an int or a list of lists of parameters, not {type(groups).__name__}"
        )
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(f"groups must be positive, not {groups}")
        parameters = [each for _, _, each in numbered(optimizer) if each.requires_grad]
        length, longer = divmod(len(parameters), groups)
        starts = [number * length + min(number, longer) for number in range(groups + 1)]
        return [parameters[i:j] for i, j in pairwise(starts)]
    own = {id(parameter) for _, _, parameter in numbered(optimizer)}
    seen: set[int] = set()
    for number, bucket in enumerate(groups):
        for member in bucket if isinstance(bucket, (list, tuple)) else [bucket]:
            if not isinstance(member, Tensor) or member is bucket:
                raise ValueError(
                    "groups must be a list of lists of parameters; group "
                    f"{number} {'is' if member is bucket else 'has'} a {type(member).__name__}"
                )
            if id(member) not in own:
                raise ValueError(
                    f"groups has a tensor (shape {list(member.shape)}) in group {number} that is "
                    "not a parameter of the optimizer: put only those into groups"
                )
            if id(member) in seen:
                raise ValueError(
                    f"groups has a parameter (shape {list(member.shape)}) twice, the second time "
                    f"in group {number}"
                )
            seen.add(id(member))
    return groups
