"""`horovod.common.util`."""

from hvdtorch.compat.util import (
    _cache,
    ccl_built,
    ddl_built,
    env,
    extension_available,
    gloo_built,
    gpu_available,
    is_iterable,
    mpi_built,
    nccl_built,
    num_rank_is_power_2,
    split_list,
)

__all__ = [
    "_cache",
    "ccl_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]
