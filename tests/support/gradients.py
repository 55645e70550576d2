"""What the tests of DistributedOptimizer need on the ranks: parameters, gradients, a record."""

from typing import Any

import torch
from torch import nn

import hvdtorch as hvd
from hvdtorch import (
    adasum_step,
    gradient_buckets,
    gradient_groups,
    gradient_launches,
    gradient_rounds,
    gradient_sparse,
    optimizer,
)

_SUBMITTERS = (
    adasum_step,
    gradient_buckets,
    gradient_groups,
    gradient_launches,
    gradient_rounds,
    gradient_sparse,
)


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def wrap(named: dict[str, nn.Parameter], **options: Any) -> Any:
    sgd = torch.optim.SGD(named.values(), lr=0.1)
    return hvd.DistributedOptimizer(sgd, named_parameters=named.items(), **options)


def push(gradient: float, *parameters: nn.Parameter) -> None:
    """A backward() in which every element of the parameters has this gradient."""
    sum((p.sum() * gradient for p in parameters), start=torch.zeros(())).backward()


def synchronize_and_step(optimizer: Any, explicit: bool) -> None:
    """A step as scripts write it: plain, or after an explicit synchronize()."""
    if explicit:
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()


def joint_buckets() -> list[gradient_buckets.JointBucket]:
    """Those of all optimizers of this process."""
    rounds = optimizer._reducer._rounds.values()
    return [bucket for each in rounds for bucket in each.launches.joint]


class Submissions(list[str]):
    """The names of the operations that the reducer submits from Python inside a `with`.

    Gradients of joint buckets are submitted natively; `gradients()` has them, too.
    """

    def __enter__(self) -> "Submissions":
        self._submit = gradient_rounds._submit
        self._before = {bucket: bucket.native.launches for bucket in joint_buckets()}

        def record(kind: int, name: str, *rest: object) -> Any:
            self.append(name)
            return self._submit(kind, name, *rest)

        for module in _SUBMITTERS:
            module._submit = record
        return self

    def __exit__(self, *_: object) -> None:
        for module in _SUBMITTERS:
            module._submit = self._submit

    def gradients(self) -> list[str]:
        names = [name for name in self if ".hvdtorch." not in name]
        for bucket in {**self._before, **dict.fromkeys(joint_buckets())}:
            launches = bucket.native.launches - (self._before.get(bucket) or 0)
            names += [slot.operation for slot in bucket.slots] * launches
        return sorted(names)
