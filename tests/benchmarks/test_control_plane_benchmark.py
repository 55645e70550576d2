"""benchmarks/control_plane.py: small jobs, real and simulated. No time is asserted."""

import json
from pathlib import Path

import control_plane
import pytest
from control_bench import report, simulated
from support.processes import REPOSITORY
from support.scripts import run_script

SCRIPT = REPOSITORY / "benchmarks" / "control_plane.py"


@pytest.mark.timeout(600)  # compiles the simulation, where that was not done before
def test_real_and_simulated_jobs(tmp_path: Path) -> None:
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = "--np 2,3 --operations 20 --ranks 2,16 --tensors 1,3"
    args = [*options.split(), "--json", str(file), "--plot", str(picture)]
    job = run_script(1, SCRIPT, timeout=580, args=args)
    assert job.returncode == 0, job.outputs
    document = json.loads(file.read_text())

    real = document["processes"]
    kinds = ("barrier", "inline", "launch")
    assert [(r["np"], r["kind"]) for r in real] == [(n, kind) for n in (2, 3) for kind in kinds]
    for row in real:
        # One frame from each rank and one to each; where one is split in two, as when a Launch
        # and the word of its end meet, some more.
        assert row["np"] - 1 <= row["frames_rank0"] <= 2 * (row["np"] - 1)
        assert 1 <= row["frames_other"] <= 2
        assert row["bytes_other"] > 0 and row["bytes_rank0"] > 0
        assert row["operations"] == 20
        assert row["cpu_rank0_us"] > 0 and row["cpu_other_us"] > 0

    rows = [simulated.Row(**row) for row in document["simulated"]]
    assert [(r.ranks, r.tensors, r.kind, r.known) for r in rows] == [
        (ranks, tensors, kind, known)
        for ranks in (2, 16)
        for tensors in (1, 3)
        for kind in ("bucket", "inline")
        for known in (False, True)
    ]
    by_key = {(r.ranks, r.tensors, r.kind, r.known): r for r in rows}
    for row in rows:
        assert row.frames_in == row.frames_out == row.ranks - 1
        assert row.us > 0
        # Every rank says the same, and reads the same.
        single = by_key[2, row.tensors, row.kind, row.known]
        assert row.bytes_in == single.bytes_in * (row.ranks - 1)
        assert row.bytes_out == single.bytes_out * (row.ranks - 1)
        if row.known:  # a slot stands for the description
            assert row.bytes_in * 5 < by_key[row.ranks, row.tensors, row.kind, False].bytes_in
    assert document["reach"].keys() == {"with sockets", "without sockets"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_reach_follows_from_the_slope() -> None:
    assert report.slope([(2, 7.0), (4, 11.0), (8, 19.0)]) == 2.0
    rows = [
        simulated.Row("bucket", True, ranks, 1, 9, 0, 0, 0, 0, us, 0.0, 0.0)
        for ranks, us in ((10, 5.0), (20, 10.0))
    ]
    lines, numbers = report.reach([], rows)
    allowed = report.STEP_MS * 1000 * report.SHARE / report.BUCKETS
    assert numbers == {"without sockets": {"us_per_rank": 0.5, "ranks": allowed / 0.5}}
    assert f"{allowed / 0.5 * report.PER_NODE:.0f} with one frame per node" in lines[1]
    assert report.reach([], rows[:1]) == ([], {})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--np 1", "'1' is not a whole number of 2 or more"),
        ("--tensors 0", "'0' is not a whole number of 1 or more"),
        ("--np none --ranks none", "nothing to measure"),
        ("--operations 0", "--operations must be above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        control_plane.parse(options.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
