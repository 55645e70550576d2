"""`horovod.torch`, as in `import horovod.torch as hvd`: the names of hvdtorch.torch."""

from typing import NoReturn

import hvdtorch.torch
from hvdtorch.compat import missing
from hvdtorch.torch import *  # noqa: F403

from .. import __version__  # noqa: F401
from . import compression, functions, mpi_ops, optimizer, sync_batch_norm  # noqa: F401

__all__ = hvdtorch.torch.__all__


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(missing(__name__, name))
