"""Every public name of `horovod.torch`, its arguments, their order and their defaults.

The table is what scripts rely on. A function here may have further arguments after these, with
defaults; none of these may be missing, renamed, moved or have another default.
"""

import inspect
import json
import subprocess
import sys

import pytest
from support.processes import clean_environment

import hvdtorch
import hvdtorch.torch as hvd
from hvdtorch.compat import PATH

CONSTANTS = {"Average": 0, "Sum": 1, "Adasum": 2, "Min": 3, "Max": 4, "Product": 5}

SET = "process_set=global_process_set"
SCALE = "prescale_factor=1.0, postscale_factor=1.0"
REDUCE = f"average=None, name=None, op=None, {SCALE}, {SET}"
REDUCE_COMPRESSED = (
    f"average=None, name=None, compression=Compression.none, op=None, {SCALE}, {SET}"
)
SCATTER = f"name=None, op=Average, {SET}, {SCALE}"
SCATTER_COMPRESSED = f"name=None, compression=Compression.none, op=Average, {SET}, {SCALE}"

FUNCTIONS = {
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "size": "",
    "rank": "",
    "local_size": "",
    "local_rank": "",
    "cross_size": "",
    "cross_rank": "",
    "mpi_threads_supported": "",
    "mpi_built": "",
    "mpi_enabled": "",
    "gloo_built": "",
    "gloo_enabled": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "nccl_built": "",
    "allreduce": f"tensor, {REDUCE_COMPRESSED}",
    "allreduce_async": f"tensor, {REDUCE}",
    "allreduce_": f"tensor, {REDUCE}",
    "allreduce_async_": f"tensor, {REDUCE}",
    "grouped_allreduce": f"tensors, {REDUCE_COMPRESSED}",
    "grouped_allreduce_async": f"tensors, {REDUCE}",
    "grouped_allreduce_": f"tensors, {REDUCE}",
    "grouped_allreduce_async_": f"tensors, {REDUCE}",
    "sparse_allreduce_async": f"tensor, name, op, {SET}",
    "allgather": f"tensor, name=None, {SET}",
    "allgather_async": f"tensor, name=None, {SET}",
    "grouped_allgather": f"tensors, name=None, {SET}",
    "grouped_allgather_async": f"tensors, name=None, {SET}",
    "broadcast": f"tensor, root_rank, name=None, {SET}",
    "broadcast_async": f"tensor, root_rank, name=None, {SET}",
    "broadcast_": f"tensor, root_rank, name=None, {SET}",
    "broadcast_async_": f"tensor, root_rank, name=None, {SET}",
    "alltoall": f"tensor, splits=None, name=None, {SET}",
    "alltoall_async": f"tensor, splits=None, name=None, {SET}",
    "reducescatter": f"tensor, {SCATTER_COMPRESSED}",
    "reducescatter_async": f"tensor, {SCATTER}",
    "grouped_reducescatter": f"tensors, {SCATTER_COMPRESSED}",
    "grouped_reducescatter_async": f"tensors, {SCATTER}",
    "join": "device=-1",
    "barrier": SET,
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {SET}",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=Compression.none, "
        "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, "
        f"groups=None, sparse_as_dense=False, {SET}"
    ),
    "SyncBatchNorm": "num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
}

# What hvdtorch does not have yet. Whoever adds one moves it into the table (or, for `elastic`,
# gives it tests of its own).
NOT_YET = {"start_timeline", "stop_timeline", "elastic"}


def parameters_of(text: str) -> list[inspect.Parameter]:
    """The parameters of `def f(<text>)`, with defaults looked up in hvdtorch.torch."""
    function = eval(f"lambda {text}: None", {name: getattr(hvd, name) for name in hvd.__all__})
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name: str) -> None:
    wanted = parameters_of(FUNCTIONS[name])
    found = list(inspect.signature(getattr(hvd, name)).parameters.values())
    ours, further = found[: len(wanted)], found[len(wanted) :]
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in wanted
    ]
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in further), further


@pytest.mark.parametrize(("name", "value"), CONSTANTS.items())
def test_constant(name: str, value: int) -> None:
    assert type(getattr(hvd, name)) is int
    assert getattr(hvd, name) == value


def test_classes() -> None:
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert isinstance(hvd.global_process_set, hvd.ProcessSet)
    assert hvd.global_process_set.process_set_id == 0
    for compressor in (hvd.Compression.none, hvd.Compression.fp16):
        assert callable(compressor.compress) and callable(compressor.decompress)


def test_every_name_is_public() -> None:
    others = {"Compression", "ProcessSet", "global_process_set", "HorovodInternalError"}
    assert {*FUNCTIONS, *CONSTANTS, *others} <= set(hvd.__all__)
    assert all(getattr(hvdtorch, name) is getattr(hvd, name) for name in hvd.__all__)


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_what_is_not_there_yet_is_not_there(name: str) -> None:
    assert not hasattr(hvd, name), f"hvd.{name} exists now: take it out of NOT_YET, and test it"


# ---- the same under Horovod's names ----

# Module: the names that scripts and libraries take from it.
MODULES = {
    "horovod": {"run", "__version__"},
    "horovod.torch": {*FUNCTIONS, *CONSTANTS}
    | {"Compression", "ProcessSet", "global_process_set", "HorovodInternalError"},
    "horovod.torch.mpi_ops": {*CONSTANTS, *FUNCTIONS}
    - {"DistributedOptimizer", "SyncBatchNorm", "allgather_object", "broadcast_object"}
    - {"broadcast_optimizer_state", "broadcast_parameters"}
    | {"is_homogeneous", "handle_average_backwards_compatibility", "num_rank_is_power_2"}
    | {"gpu_available", "_basics"}
    | {"HorovodAllreduce", "HorovodGroupedAllreduce", "HorovodAllgather", "HorovodBroadcast"}
    | {"HorovodGroupedAllgather", "HorovodAlltoall", "HorovodReducescatter"}
    | {"HorovodGroupedReducescatter"},
    "horovod.torch.compression": {"Compressor", "NoneCompressor", "FP16Compressor", "Compression"},
    "horovod.torch.functions": {"broadcast_parameters", "broadcast_optimizer_state"}
    | {"broadcast_object", "allgather_object"},
    "horovod.torch.optimizer": {"DistributedOptimizer", "_DistributedOptimizer"}
    | {"_DistributedAdasumOptimizer"},
    "horovod.torch.sync_batch_norm": {"SyncBatchNorm"},
    "horovod.common.exceptions": {"HorovodInternalError", "HostsUpdatedInterrupt"}
    | {"HorovodVersionMismatchError"},
    "horovod.common.process_sets": {"ProcessSet", "global_process_set"}
    | {"add_process_set", "remove_process_set"},
    "horovod.common.util": {"env", "split_list", "gloo_built", "mpi_built", "nccl_built"}
    | {"ddl_built", "ccl_built", "extension_available", "gpu_available", "num_rank_is_power_2"}
    | {"is_iterable", "_cache"},
    "horovod.runner": {"run"},
}

# In a process of its own: this one must not know a module `horovod`.
READ_MODULES = """
import importlib, json, sys
import hvdtorch.torch
missing, others = [], []
for module, names in json.loads(sys.argv[1]).items():
    module = importlib.import_module(module)
    for name in names:
        if not hasattr(module, name):
            missing.append(f"{module.__name__}.{name}")
        elif getattr(hvdtorch.torch, name, getattr(module, name)) is not getattr(module, name):
            others.append(f"{module.__name__}.{name}")
print(json.dumps([missing, others]))
"""


def test_horovods_modules_have_the_same_objects() -> None:
    modules = {module: sorted(names) for module, names in MODULES.items()}
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{PATH}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-c", READ_MODULES, json.dumps(modules)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    missing, others = json.loads(done.stdout)
    assert missing == []
    # These two take more arguments in horovod.common.util: a module's own version, and `verbose`.
    assert set(others) == {"horovod.__version__"} | {
        f"horovod.common.util.{kind}_built" for kind in ("ccl", "ddl", "gloo", "mpi", "nccl")
    }
