"""benchmarks/two_hosts.py: a short run, and what it makes of a time. No time is asserted."""

import json
import sys
from pathlib import Path

import pytest
from support.processes import REPOSITORY
from support.scripts import run_script

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import two_hosts
from bench_tools import namespaces


def test_link_is_what_the_cable_had_to_carry() -> None:
    row = {"bytes": 64 << 20, "median_us": 0.5e6, "ratio": None}
    judged = two_hosts.judged(row, 2, "1gbit")  # each host sends as much as the tensor has
    assert judged["link_gb_s"] == (64 << 20) / 0.5 / 1e9
    assert judged["share_of_line_rate"] == (64 << 20) / 0.5 / 125e6
    assert two_hosts.judged(row, 4, "2gbit")["share_of_line_rate"] == 1.5 * (64 << 20) / 125e6


@pytest.mark.parametrize("rate", ["fast", "1tbit", "gbit"])
def test_rates_that_are_none(rate: str) -> None:
    with pytest.raises(ValueError):
        two_hosts.bits_per_second(rate)


@pytest.mark.timeout(200)
def test_run_writes_checked_rows(tmp_path: Path) -> None:
    if reason := namespaces.missing():
        pytest.skip(f"two hosts cannot be simulated here: {reason}")
    file = tmp_path / "out.json"
    options = f"--rate 10gbit --sizes 4KiB,16MiB --seconds 0.1 --json {file}"
    script = REPOSITORY / "benchmarks" / "two_hosts.py"
    job = run_script(1, script, timeout=180, args=options.split())
    assert job.returncode == 0, job.outputs
    document = json.loads(file.read_text())
    assert (document["np"], document["hosts"], document["rate"]) == (4, 2, "10gbit")
    rows = document["rows"]
    assert {(row["bytes"], row["peer"]) for row in rows} == {
        (size, peer) for size in (4096, 16 << 20) for peer in ("hvdtorch", "gloo")
    }
    assert [row["wrong"] for row in rows] == [0] * 4
    assert all(row["share_of_line_rate"] > 0 for row in rows)
    assert len(document["goals"]) == 2  # latency of the small one, bandwidth of the large one
