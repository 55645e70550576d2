"""benchmarks/kernels.py: one small run of it. No time is asserted: times belong to machines."""

import json
import subprocess
import sys
from pathlib import Path

from support.processes import REPOSITORY


def test_rows_are_those_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "kernels.py")]
    command += ["--dtypes", "float32,bool", "--ops", "Sum,Average", "--isas", "plain"]
    command += ["--sources", "2,3", "--sizes", "4096", "--rounds", "1", "--json", str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    keys = [(row["dtype"], row["op"], row["sources"], row["bytes"], row["isa"]) for row in rows]
    assert keys == [
        ("float32", "Sum", 2, 4096, "plain"),
        ("float32", "Sum", 3, 4096, "plain"),
        ("float32", "Average", 2, 4096, "plain"),
        ("float32", "Average", 3, 4096, "plain"),
        ("bool", "Sum", 2, 4096, "plain"),  # an average of bool has no meaning
        ("bool", "Sum", 3, 4096, "plain"),
    ]
    assert all(row["gbps"] > 0 and row["memcpy_gbps"] > 0 for row in rows)
    assert done.stdout.count("float32") == 4


def test_a_name_that_does_not_exist_ends_it() -> None:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "kernels.py"), "--ops", "Mean"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "unknown name 'Mean'" in done.stderr
