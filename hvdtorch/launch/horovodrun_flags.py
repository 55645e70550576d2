"""Flags of horovodrun that hvdrun does not act on.

One without which the job still does what was asked, if perhaps not as fast, is accepted with a
warning that says why it has no effect (`UNUSED`). One without which it would be another job ends
hvdrun (`REFUSED`). All other flags of horovodrun are hvdrun's own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unused:
    """A flag that is accepted."""

    flag: str
    why: str  # completes "FLAG has no effect: ..."; "": it asks for what happens anyway
    takes_value: bool = False


_AUTOTUNE = "autotuning is not available yet"
_TIMELINE = "no timeline is written, hvdtorch has none yet"
_ALGORITHM = "choosing an algorithm is not available yet; results do not depend on it"
_NCCL = "NCCL is not available yet"
_MPI = "hvdtorch works without MPI"

UNUSED = (
    Unused("--gloo", ""),
    Unused("--disable-cache", ""),
    Unused("--autotune", _AUTOTUNE),
    Unused("--no-autotune", ""),
    Unused("--autotune-log-file", _AUTOTUNE, takes_value=True),
    Unused("--autotune-warmup-samples", _AUTOTUNE, takes_value=True),
    Unused("--autotune-steps-per-sample", _AUTOTUNE, takes_value=True),
    Unused("--autotune-bayes-opt-max-samples", _AUTOTUNE, takes_value=True),
    Unused("--autotune-gaussian-process-noise", _AUTOTUNE, takes_value=True),
    Unused("--timeline-filename", _TIMELINE, takes_value=True),
    Unused("--timeline-mark-cycles", _TIMELINE),
    Unused("--no-timeline-mark-cycles", ""),
    Unused("--hierarchical-allreduce", _ALGORITHM),
    Unused("--no-hierarchical-allreduce", ""),
    Unused("--hierarchical-allgather", _ALGORITHM),
    Unused("--no-hierarchical-allgather", ""),
    Unused("--torus-allreduce", _ALGORITHM),
    Unused("--no-torus-allreduce", ""),
    Unused("--num-nccl-streams", _NCCL, takes_value=True),
    Unused("--tcp", _NCCL),
    Unused("--mpi", _MPI),
    Unused("--mpi-args", _MPI, takes_value=True),
    Unused("--mpi-threads-disable", _MPI),
    Unused("--no-mpi-threads-disable", ""),
    Unused("--binding-args", f"{_MPI}; --thread-affinity chooses cores", takes_value=True),
)

_HOSTS = "running on several hosts is not available in hvdrun yet"
_ELASTIC = "an elastic job is not available in hvdrun yet"

REFUSED = {
    "-p": _HOSTS,
    "--ssh-port": _HOSTS,
    "-i": _HOSTS,
    "--ssh-identity-file": _HOSTS,
    "--jsrun": "hvdrun starts the ranks itself, on this host; leave this flag out",
    "--min-np": _ELASTIC,
    "--min-num-proc": _ELASTIC,
    "--max-np": _ELASTIC,
    "--max-num-proc": _ELASTIC,
    "--slots-per-host": _ELASTIC,
    "--elastic-timeout": _ELASTIC,
    "--reset-limit": _ELASTIC,
    "--blacklist-cooldown-range": _ELASTIC,
    "--host-discovery-script": _ELASTIC,
}
