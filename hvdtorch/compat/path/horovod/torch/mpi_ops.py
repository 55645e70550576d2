"""`horovod.torch.mpi_ops`: init, ranks and collectives, and what libraries reach for besides."""

from typing import NoReturn

import hvdtorch.torch
from hvdtorch import basics as _basics
from hvdtorch.basics import is_homogeneous
from hvdtorch.compat import missing
from hvdtorch.compat.autograd import (
    HorovodAllgather,
    HorovodAllreduce,
    HorovodAlltoall,
    HorovodBroadcast,
    HorovodGroupedAllgather,
    HorovodGroupedAllreduce,
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    handle_average_backwards_compatibility,
)
from hvdtorch.torch import *  # noqa: F403

from ..common.exceptions import HorovodInternalError
from ..common.process_sets import ProcessSet, global_process_set
from ..common.util import gpu_available, num_rank_is_power_2

__all__ = [
    *hvdtorch.torch.__all__,
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodInternalError",
    "HorovodReducescatter",
    "ProcessSet",
    "_basics",
    "global_process_set",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "is_homogeneous",
    "num_rank_is_power_2",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(missing(__name__, name))
