"""Thousands of rounds of random programs: results exact, nobody hangs, nothing is left over.

The seed is printed when a program fails. To repeat it, or to run longer:

    HVDTORCH_TEST_SEED=17 HVDTORCH_TEST_ROUNDS=100000 pytest tests/api/test_random_programs.py
"""

import contextlib
import gc
import os
import time
from pathlib import Path

import pytest
from random_programs import Program
from support.cluster import Cluster, Clusters

import hvdtorch as hvd

ROUNDS = int(os.environ.get("HVDTORCH_TEST_ROUNDS", "0"))  # 0: each test's own number
SEED = os.environ.get("HVDTORCH_TEST_SEED")


def resources() -> dict[str, int]:
    """What the process holds of the system, shared memory apart."""
    gc.collect()
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "file descriptors": len([link for link in links() if "memfd:hvdtorch" not in link]),
    }


def links() -> list[str]:
    """What this process's descriptors are of."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself
            found.append(os.readlink(entry))
    return found


def run_program(seed: int, rounds: int, divide_by_active: bool) -> int:
    print(f"random program of seed {seed}, {rounds} rounds", flush=True)
    before = resources()
    compared = Program(seed, rounds, divide_by_active).run()
    hvd.barrier()
    deadline = time.monotonic() + 5.0  # threads of removed process sets may still be leaving
    while (after := resources()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after == before, f"held before: {before}, after: {after}"
    # The arena grows when it is first used, by few regions, and a process set that exists has one
    # segment. Those of the many that were removed are gone.
    segments = [link for link in links() if "memfd:hvdtorch" in link]
    assert len(segments) < 12, segments
    return compared


def run(cluster: Cluster, rounds: int, divide_by_active: bool = False) -> None:
    seed = int(SEED or int.from_bytes(os.urandom(4), "little"))
    print(f"HVDTORCH_TEST_SEED={seed} HVDTORCH_TEST_ROUNDS={rounds}")  # shown if it fails
    timeout = max(120.0, rounds / 5)
    compared = cluster.run(run_program, seed, rounds, divide_by_active, timeout=timeout)
    assert min(compared) > rounds


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_default_settings(cluster: Cluster) -> None:
    run(cluster, ROUNDS or 1000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_limits_that_are_hit_all_the_time(all_clusters: Clusters) -> None:
    settings = {
        "HVDTORCH_CACHE_CAPACITY": "3",
        "HVDTORCH_CYCLE_TIME": "0",
        "HVDTORCH_FUSION_THRESHOLD": "4096",
        "HVDTORCH_INLINE_LIMIT": "64",
        "HVDTORCH_LONE_INLINE_LIMIT": "128",
        "HVDTORCH_JOIN_DIVISOR": "active",
    }
    run(all_clusters.get(3, settings), ROUNDS or 500, divide_by_active=True)
