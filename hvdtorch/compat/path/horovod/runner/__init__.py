"""`horovod.runner`: calling a function on every rank."""

from typing import NoReturn

from hvdtorch.compat import missing
from hvdtorch.launch.function import run

__all__ = ["run"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(missing(__name__, name))
