"""A name for optimizers wrapped with op=Adasum.

hvdtorch has one class for all wrapped optimizers. Horovod has two, and libraries use the second one
to ask, by `isinstance`, whether they have one of that kind before them.
"""

from __future__ import annotations

from typing import Any

from hvdtorch.collectives import Adasum
from hvdtorch.optimizer import _DistributedOptimizer


class _AsksForOp(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _DistributedOptimizer) and instance.op == Adasum


class _DistributedAdasumOptimizer(metaclass=_AsksForOp):
    """What is an instance of it: any result of `DistributedOptimizer(..., op=hvd.Adasum)`."""
