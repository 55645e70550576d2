"""Processes that tests start: their environment, and the proof that none of them is left.

Every process started for a test carries a random tag in its environment, which all its descendants
inherit, even those that move to another session or process group. So "what is left of this job" is
a search through /proc, not a guess.
"""

import os
import signal
import time
import uuid
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TAG = "HVDTORCH_TEST_TAG"

# What a launcher may have set around pytest itself; a job under test must not see it.
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_LAUNCHER_PREFIXES = ("HVDTORCH_", "HOROVOD_", "TORCHELASTIC_", "OMPI_", "PMI_", "SLURM_", "GROUP_")


def new_tag() -> str:
    """A value for `TAG` that nobody else has."""
    return uuid.uuid4().hex


def clean_environment() -> dict[str, str]:
    """The environment without any launcher's or hvdtorch's variables, for a job under test."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in _LAUNCHER_VARIABLES and not key.startswith(_LAUNCHER_PREFIXES)
    }
    search = [str(REPOSITORY), str(REPOSITORY / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, search))
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONFAULTHANDLER"] = "1"  # SIGABRT prints the stacks
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun would set for one rank of a job on this host, its store at `port`."""
    return clean_environment() | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is hosted by the test process
    }


def tagged(tag: str) -> list[int]:
    """Ids of the living processes (no zombies) that were started with `tag`."""
    needle = f"{TAG}={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found)


def kill_tagged(tag: str, signal_number: int = signal.SIGKILL) -> None:
    """Send a signal to all processes with `tag`; after SIGKILL, return when none is left."""
    while pids := tagged(tag):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        if signal_number != signal.SIGKILL:
            return
        time.sleep(0.01)


def wait_untagged(tag: str, seconds: float) -> list[int]:
    """Wait until no process with `tag` lives; the ids of those that still do after `seconds`."""
    deadline = time.monotonic() + seconds
    while (pids := tagged(tag)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return pids
