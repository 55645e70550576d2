"""The public API: `import hvdtorch.torch as hvd`, or `import hvdtorch as hvd`. Re-exports only."""

from typing import TYPE_CHECKING

import torch

from hvdtorch import native

native.check(torch.__version__)

from hvdtorch.basics import (  # noqa: E402
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from hvdtorch.broadcast_state import (  # noqa: E402
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdtorch.collectives import (  # noqa: E402
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from hvdtorch.compat import missing as _missing  # noqa: E402
from hvdtorch.compression import Compression  # noqa: E402
from hvdtorch.exceptions import HorovodInternalError  # noqa: E402
from hvdtorch.objects import allgather_object, broadcast_object  # noqa: E402
from hvdtorch.optimizer import DistributedOptimizer  # noqa: E402
from hvdtorch.presence import expected_stall, join  # noqa: E402
from hvdtorch.process_sets import (  # noqa: E402
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdtorch.shared_memory import shared_empty  # noqa: E402
from hvdtorch.sync_batch_norm import SyncBatchNorm  # noqa: E402
from hvdtorch.version import __version__  # noqa: E402

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "expected_stall",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shared_empty",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]

if not TYPE_CHECKING:  # else type checkers would take any name for one that exists

    def __getattr__(name: str) -> None:
        raise AttributeError(_missing(__name__, name))
