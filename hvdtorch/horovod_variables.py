"""Horovod's variables that are no setting here: accepted, and said to have no effect.

`VARIABLES` says of each one why: it has no meaning in hvdtorch, or what it asks for is not
available yet. `remarks()` picks those that a job has set, and guesses at misspelt `HOROVOD_` names;
`report()` logs them, which `hvd.init()` does once, on rank 0. The documentation shows the table.
What does have a meaning is in config.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Mapping

from hvdtorch.config import SETTINGS
from hvdtorch.log import logger

PREFIX = "HOROVOD_"


@dataclasses.dataclass(frozen=True)
class Variable:
    """One variable of Horovod that hvdtorch does not act on."""

    name: str
    why: str  # completes "NAME has no effect: ..."
    missed: bool = False  # its user would look for something that is not there: a warning
    switch: bool = False  # a value that means "off" asks for what happens anyway: not a word


_MPI = "hvdtorch works without MPI"
_MEETING = "the ranks meet at MASTER_ADDR and MASTER_PORT"
_SPARK = "hvdtorch has no integration with Spark"
_AUTOTUNE = "autotuning is not available yet"
_ELASTIC = "elastic training is not available yet"
_ALGORITHM = "choosing an algorithm is not available yet; results do not depend on it"

VARIABLES: tuple[Variable, ...] = (
    # Not available yet.
    Variable("HOROVOD_TIMELINE", "no timeline is written, hvdtorch has none yet", missed=True),
    Variable("HOROVOD_TIMELINE_MARK_CYCLES", "the timeline is not available yet", switch=True),
    Variable("HOROVOD_AUTOTUNE", _AUTOTUNE, missed=True, switch=True),
    Variable("HOROVOD_AUTOTUNE_LOG", f"no log is written, {_AUTOTUNE}", missed=True),
    Variable("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", _AUTOTUNE),
    Variable("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", _AUTOTUNE),
    Variable("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", _AUTOTUNE),
    Variable("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", _AUTOTUNE),
    Variable("HOROVOD_ELASTIC", _ELASTIC, missed=True, switch=True),
    Variable("HOROVOD_ELASTIC_TIMEOUT", _ELASTIC),
    Variable("HOROVOD_HIERARCHICAL_ALLREDUCE", _ALGORITHM, switch=True),
    Variable("HOROVOD_HIERARCHICAL_ALLGATHER", _ALGORITHM, switch=True),
    Variable("HOROVOD_TORUS_ALLREDUCE", _ALGORITHM, switch=True),
    Variable("HOROVOD_NUM_NCCL_STREAMS", "NCCL is not available yet"),
    # Without a meaning here.
    Variable("HOROVOD_DYNAMIC_PROCESS_SETS", "process sets can be added at any time", switch=True),
    Variable("HOROVOD_BATCH_D2D_MEMCOPIES", "how tensors are packed is not a choice here"),
    Variable(
        "HOROVOD_ENABLE_ASYNC_COMPLETION", "operations never block a GPU's host here", switch=True
    ),
    Variable("HOROVOD_DISABLE_NVTX_RANGES", "hvdtorch marks no NVTX ranges", switch=True),
    Variable("HOROVOD_MPI_THREADS_DISABLE", _MPI, switch=True),
    Variable("HOROVOD_ADASUM_MPI_CHUNK_SIZE", _MPI),
    Variable("HOROVOD_GLOO_RENDEZVOUS_ADDR", _MEETING),
    Variable("HOROVOD_GLOO_RENDEZVOUS_PORT", _MEETING),
    Variable("HOROVOD_CCL_CACHE", "hvdtorch has no oneCCL", switch=True),
    Variable("DDL_OPTIONS", "hvdtorch has no DDL"),
    Variable("HOROVOD_ENABLE_XLA_OPS", "XLA belongs to TensorFlow", switch=True),
    Variable("HOROVOD_SPARK_START_TIMEOUT", _SPARK),
    Variable("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", _SPARK, switch=True),
    Variable("HOROVOD_SPARK_PYTHONPATH", _SPARK),
    Variable("HOROVOD_SPARK_WORK_DIR", _SPARK),
    Variable("_HOROVOD_SECRET_KEY", "the key of a job is HVDTORCH_JOB_KEY"),
    Variable("HOROVOD_TEST_GPU", "it belongs to Horovod's own tests", switch=True),
)

# A launcher says with these who a process is; scripts read them, hvdtorch does not.
PLACE = tuple(
    f"{PREFIX}{name}"
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
)

# How the names of the switches of Horovod's build start.
BUILD_PREFIXES = tuple(
    f"{PREFIX}{name}"
    for name in (
        *("ALLOW_MIXED_GPU_IMPL", "BUILD_", "CMAKE", "CUDA_", "GPU", "NCCL_"),
        *("NVTX_", "ROCM_", "WITH_", "WITHOUT_"),
    )
)
BUILD_WHY = "it is for Horovod's build; hvdtorch's own is set at the top of setup.py"


def _is_off(text: str) -> bool:
    text = text.strip().lower()
    if text in ("false", "no", "off"):
        return True
    try:
        return int(text) <= 0
    except ValueError:
        return False


def remarks(environ: Mapping[str, str]) -> list[tuple[int, str]]:
    """What there is to say about the Horovod variables in `environ`: (logging level, sentence).

    Variables that are empty count as not set. `logging.WARNING` where the user would miss
    something, or has probably misspelt a name; else `logging.INFO`.
    """
    table = {variable.name: variable for variable in VARIABLES}
    meant = {name for row in SETTINGS for name in row.aliases}.union(PLACE)
    found = []
    for name, text in sorted(environ.items()):
        if name in meant or not text.strip():
            continue
        if name in table:
            variable = table[name]
            if variable.switch and _is_off(text):
                continue
            level = logging.WARNING if variable.missed else logging.INFO
            found.append((level, f"{name} has no effect: {variable.why}"))
        elif name.startswith(BUILD_PREFIXES):
            found.append((logging.INFO, f"{name} has no effect: {BUILD_WHY}"))
        elif name.startswith(PREFIX):
            close = difflib.get_close_matches(name, [*sorted(meant), *table], n=1, cutoff=0.9)
            if close:
                found.append((logging.WARNING, f"ignoring {name}: did you mean {close[0]}?"))
            else:
                found.append((logging.INFO, f"{name} has no effect: hvdtorch does not know it"))
    return found


def report(environ: Mapping[str, str]) -> None:
    """Log the remarks on `environ`, one line each."""
    for level, sentence in remarks(environ):
        logger.log(level, sentence)
