"""The variables that every rank gets: who it is, where to meet the others, and the job's key.

The names are those of torchrun, so that everything that starts under torchrun starts under hvdrun,
and those that scripts written for Horovod read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtorch.compat import PATH


@dataclass(frozen=True)
class JobSpec:
    """What all ranks of a job on one host share."""

    size: int
    hostname: str
    port: int  # of the rendezvous store on the loopback interface
    key: str  # shared secret
    settings: Mapping[str, str]  # variables set by flags
    as_horovod: bool = False  # `import horovod` means hvdtorch


def rank_environment(base: Mapping[str, str], job: JobSpec, rank: int) -> dict[str, str]:
    """The whole environment of one rank: `base`, the settings, and what the launcher decides.

    `base` is hvdrun's own environment. What it says about another job that hvdrun itself may be
    a part of is replaced, or left out (TORCHELASTIC_*).
    """
    environ = {name: text for name, text in base.items() if not name.startswith("TORCHELASTIC_")}
    environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // job.size)))
    environ.update(job.settings)
    if job.as_horovod:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PATH, environ.get("PYTHONPATH")]))
    place = {
        "RANK": rank,
        "WORLD_SIZE": job.size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": job.size,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": job.port,
        # The store is served at that port already: rank 0 connects to it like the others.
        # TORCHELASTIC_RUN_ID stays unset, it would promise a torchrun agent.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": job.size,
        "HOROVOD_LOCAL_RANK": rank,
        "HOROVOD_LOCAL_SIZE": job.size,
        "HOROVOD_CROSS_RANK": 0,
        "HOROVOD_CROSS_SIZE": 1,
        "HOROVOD_HOSTNAME": job.hostname,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HVDTORCH_JOB_KEY": job.key,
        "PYTHONUNBUFFERED": 1,
    }
    environ.update((name, str(value)) for name, value in place.items())
    return environ


def _cores() -> int:
    return len(os.sched_getaffinity(0))
