"""Thousands of rounds of random programs: results exact, nobody hangs, nothing is left over.

The seed is printed when a program fails. To repeat it, or to run longer:

    HVDTORCH_TEST_SEED=17 HVDTORCH_TEST_ROUNDS=100000 pytest tests/api/test_random_programs.py
"""

import gc
import os
import time
from pathlib import Path

import pytest
from random_programs import Program

import hvdtorch as hvd

ROUNDS = int(os.environ.get("HVDTORCH_TEST_ROUNDS", "1000"))
SEED = os.environ.get("HVDTORCH_TEST_SEED")


def resources() -> dict[str, int]:
    """What the process holds of the system."""
    gc.collect()
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "file descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def run_program(seed: int, rounds: int) -> int:
    print(f"random program of seed {seed}, {rounds} rounds", flush=True)
    before = resources()
    compared = Program(seed, rounds).run()
    hvd.barrier()
    deadline = time.monotonic() + 5.0  # threads of removed process sets may still be leaving
    while (after := resources()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after == before, f"held before: {before}, after: {after}"
    return compared


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.np(1, 2, 3, 4)
def test_random_programs(cluster):
    seed = int(SEED or int.from_bytes(os.urandom(4), "little"))
    print(f"HVDTORCH_TEST_SEED={seed} HVDTORCH_TEST_ROUNDS={ROUNDS}")  # shown if it fails
    compared = cluster.run(run_program, seed, ROUNDS, timeout=max(120.0, ROUNDS / 5))
    assert min(compared) > ROUNDS
