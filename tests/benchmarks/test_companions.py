"""Peers in companion processes: results are checked, nobody runs out of turn, nothing stays behind.

run_script() itself fails if a process of the job is left.
"""

import json
import textwrap
from pathlib import Path

import pytest
from support.processes import REPOSITORY
from support.scripts import ScriptResult, run_script

SCRIPT = REPOSITORY / "benchmarks" / "collectives.py"
SERVED = "collective_bench.horovod_peer:Horovod"


def run_beside(python: Path, peers: str, file: Path, options: str) -> ScriptResult:
    options = f"--np 2 --iterations 3 --peers {peers} {options}"
    where = ["--horovod-python", str(python), "--json", str(file)]
    return run_script(1, SCRIPT, timeout=180, args=[*options.split(), *where])


def run_ranks(text: str, python: Path, kind: str = "gloo") -> ScriptResult:
    head = f"""
        import os, signal, sys, time
        from pathlib import Path
        sys.path.insert(0, {str(REPOSITORY / "benchmarks")!r})
        import torch.distributed as dist
        from companions.beside import Companion, CompanionError
        from collective_bench.cases import Case

        def state(pid):
            return Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[0]

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        companion = Companion(Path({str(python)!r}), {kind!r}, {SERVED!r})
    """
    source = textwrap.dedent(head) + textwrap.dedent(text)
    return run_script(2, source, launcher="torchrun", timeout=120)


@pytest.mark.timeout(200)
def test_results_of_companions_are_in_the_table(tmp_path: Path, fake_horovod: Path) -> None:
    file = tmp_path / "out.json"
    options = "--sizes 4B,4KiB --many 3x4KB --collectives allreduce --ops sum,average"
    job = run_beside(fake_horovod, "horovod-gloo", file, options)
    assert job.returncode == 0, job.outputs
    document = json.loads(file.read_text())
    assert document["peers"]["horovod-gloo"].startswith("Horovod fake, torch ")
    rows = [row for row in document["rows"] if row["peer"] == "horovod-gloo"]
    assert [(r["tensors"], r["samples"], r["wrong"]) for r in rows] == [
        *[(1, 3, 0)] * 4,
        *[(3, 3, 0)] * 2,
    ]
    assert all(0 < row["median_us"] <= row["p99_us"] for row in rows)


@pytest.mark.timeout(200)
def test_wrong_results_of_a_companion_are_counted(tmp_path: Path, wrong_horovod: Path) -> None:
    file = tmp_path / "out.json"
    options = "--sizes 4KiB --many none --collectives allreduce"
    job = run_beside(wrong_horovod, "horovod-gloo", file, options)
    assert job.returncode == 1, job.outputs
    wrong = {row["peer"]: row["wrong"] for row in json.loads(file.read_text())["rows"]}
    assert wrong == dict.fromkeys(wrong, 0) | {"horovod-gloo": 3 * 1024}


def test_a_companion_is_stopped_between_its_turns(fake_horovod: Path) -> None:
    text = """
        assert state(companion._pid) == "T"
        companion.call("prepare", Case("allreduce", 64, "float32", "sum", 2), rank)
        nanoseconds, wrong = companion.call("sample_there")
        assert nanoseconds > 0 and wrong == 0
        assert state(companion._pid) == "T"
        companion.close()
        assert not Path(f"/proc/{companion._pid}").exists()
    """
    job = run_ranks(text, fake_horovod)
    assert job.returncode == 0, job.outputs


@pytest.mark.parametrize("victim", [0, 1])
def test_nothing_stays_behind_when_a_rank_is_killed(fake_horovod: Path, victim: int) -> None:
    text = f"""
        if rank == {victim}:
            print("all companions are there", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        companion.call("prepare", Case("allreduce", 64, "float32", "sum", 2), rank)
        companion.call("sample_there")
    """
    job = run_ranks(text, fake_horovod)
    assert job.returncode != 0
    assert "all companions are there" in job.outputs[0]


def test_what_goes_wrong_in_a_companion_is_told(fake_horovod: Path) -> None:
    text = """
        try:
            companion.call("prepare", None, rank)
        except CompanionError as error:
            assert f"the companion of rank {rank} (gloo, " in str(error)
            assert "AttributeError: 'NoneType' object has no attribute" in str(error)
            os.kill(companion._pid, signal.SIGKILL)
        try:
            companion.call("prepare", None, rank)
        except CompanionError as error:
            assert "ended while it was asked to ('call', 'prepare'," in str(error)
            companion.close()
            sys.exit(0)
        sys.exit("no error")
    """
    job = run_ranks(text, fake_horovod)
    assert job.returncode == 0, job.outputs


def test_an_interpreter_that_is_none_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    job = run_ranks("", python)
    assert job.returncode != 0
    assert "ended with status 3 before it connected" in job.outputs[0]


@pytest.mark.timeout(300)
def test_horovod_over_gloo_and_mpi(tmp_path: Path, horovod: Path) -> None:
    file = tmp_path / "out.json"
    options = "--sizes 4B,4KiB --many 3x4KB --ops average"
    options += " --collectives allreduce,allgather,broadcast,alltoall,reducescatter"
    job = run_beside(horovod, "horovod-gloo,horovod-mpi", file, options)
    assert job.returncode == 0, job.outputs
    rows = [row for row in json.loads(file.read_text())["rows"] if "horovod" in row["peer"]]
    assert len(rows) == 2 * (5 * 2 + 1)
    assert [row for row in rows if row["wrong"] != 0] == []


@pytest.mark.parametrize("kind", ["gloo", "mpi"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.timeout(200)
def test_nothing_stays_behind_of_horovod(horovod: Path, kind: str, victim: int) -> None:
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    text = f"""
        if rank == {victim}:
            print("all companions are there", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        companion.call("prepare", Case("allreduce", 64, "float32", "sum", 2), rank)
        companion.call("sample_there")
    """
    job = run_ranks(text, horovod, kind)
    assert job.returncode != 0
    assert "all companions are there" in job.outputs[0]
    left = [path for path in set(shared.iterdir()) - before if "vader" in path.name]
    assert left + list(shared.glob("hvdbench-*")) == []
