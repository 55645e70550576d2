"""benchmarks/collectives.py: the whole of it on two ranks, and the parts its claims rest on.

No time is asserted: times belong to machines.
"""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import collectives
import pytest
import torch
from bench_tools import machine
from collective_bench import cases, goals, measure, peers, plot, report
from support.processes import REPOSITORY
from support.scripts import run_script

import hvdtorch as hvd

SCRIPT = REPOSITORY / "benchmarks" / "collectives.py"


@pytest.mark.timeout(200)
def test_run_on_two_ranks_writes_checked_rows(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = "--np 2 --sizes 4B,4KiB --many 3x4KB --dtypes float32,bfloat16 --ops sum,average"
    options += " --iterations 3 --collectives allreduce,allgather,broadcast,alltoall,reducescatter"
    job = run_script(1, SCRIPT, timeout=180, args=[*options.split(), "--json", str(file)])
    assert job.returncode == 0, job.outputs
    document = json.loads(file.read_text())
    assert document["np"] == 2
    ours = {"hvdtorch"} | ({"hvdtorch-arena"} if hasattr(hvd, "shared_empty") else set())
    assert document["peers"].keys() == ours | {"gloo"}
    rows = document["rows"]
    asked = {
        (collective, tensors, dtype, op, peer)
        for collective, tensors, ops in (
            ("allreduce", 1, ("sum", "average")),
            ("allreduce", 3, ("sum", "average")),
            ("allgather", 1, ("-",)),
            ("broadcast", 1, ("-",)),
            ("alltoall", 1, ("-",)),
            ("reducescatter", 1, ("sum", "average")),
        )
        for op in ops
        for dtype in ("float32", "bfloat16")
        for peer in (*ours, "gloo")
    }
    keys = [(r["collective"], r["tensors"], r["dtype"], r["op"], r["peer"]) for r in rows]
    assert set(keys) == asked
    assert {r["samples"] for r in rows} == {3}
    assert [r for r in rows if r["wrong"] != 0] == []
    assert all(0 < r["median_us"] <= r["p99_us"] for r in rows)
    assert all((r["ratio"] is None) == (r["peer"] == "hvdtorch") for r in rows)
    assert job.outputs[0].count("allreduce") >= sum(r["collective"] == "allreduce" for r in rows)
    assert [goal["limit"] for goal in document["goals"]] == [1 / 3, 1 / 4, 10]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--sizes 4X", "'4X' is not a size"),
        ("--sizes 0B", "'0B' is not a size"),
        ("--many 160", "'160' is not a number"),
        ("--ops product", "'product' is none of sum, average"),
        ("--sizes none --many none", "nothing to measure"),
        ("--sizes none --collectives alltoall", "nothing to measure"),
        ("--collectives none", "nothing to measure"),
        ("--peers horovod-mpi", "need --horovod-python"),
        ("--peers gloo,horovod-gloo --horovod-python /nowhere/python", "there is no such file"),
        ("--peers mpi", "'mpi' is none of"),
        ("--np 100 --dtypes bfloat16", "cannot be checked"),
        ("--np 100 --dtypes bfloat16 --collectives reducescatter", "cannot be checked"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        collectives.parse(options.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_only_allreduce_has_many_sizes_by_default() -> None:
    def lines(options: str) -> dict[str, int]:
        made = collectives.make_cases(collectives.parse(options.split()), 2)
        return dict(Counter(case.collective for case in made if case.tensors == 1))

    assert lines("") == {"allreduce": 9, "alltoall": 2, "reducescatter": 2}
    assert lines("--sizes 4B") == {"allreduce": 1, "alltoall": 1, "reducescatter": 1}
    assert lines("--sizes none") == {}


def test_sizes_are_decimal_or_binary_as_written() -> None:
    sizes = ("4", "4B", "4KB", "4KiB", "3MB", "64MiB", "1GiB")
    expected = [4, 4, 4000, 4096, 3_000_000, 2**26, 2**30]
    assert [cases.parse_bytes(text) for text in sizes] == expected
    shown = ["4 B", "4 KB", "4 KiB", "64 MiB", "1234 B"]
    assert [cases.show_bytes(n) for n in (4, 4000, 4096, 2**26, 1234)] == shown


@pytest.mark.parametrize("dtype", list(cases.DTYPES))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_expected_results_follow_from_the_inputs_and_are_exact(dtype: str, size: int) -> None:
    def case(collective: str, op: str = "-") -> cases.Case:
        return cases.Case(collective, 8 * 240, dtype, op, size)

    inputs = [case("allreduce", "sum").input(rank, tensor=7).double() for rank in range(size)]
    total = torch.stack(inputs).sum(0)
    assert len(total.unique()) == 5  # neighbours differ, so a misplaced block shows
    assert torch.equal(case("allreduce", "sum").result(0, tensor=7).double(), total)
    average = total / size if cases.DTYPES[dtype].is_floating_point else (total / size).trunc()
    assert torch.equal(case("allreduce", "average").result(0, tensor=7).double(), average)
    gathered = torch.cat([case("allgather").input(rank) for rank in range(size)])
    assert torch.equal(case("allgather").result(0), gathered)
    assert gathered.numel() == case("allgather").count
    assert torch.equal(case("broadcast").result(0), case("broadcast").input(cases.ROOT))
    for op, whole in (("sum", total), ("average", average)):
        parts = [case("reducescatter", op).result(rank, tensor=7) for rank in range(size)]
        assert torch.equal(torch.cat(parts).double(), whole)
        assert len({part.numel() for part in parts}) == 1
        assert size == 1 or not torch.equal(parts[0], parts[1])  # another rank's part shows
    sent = torch.stack([case("alltoall").input(rank) for rank in range(size)])  # [from, to x part]
    received = torch.stack([case("alltoall").result(rank) for rank in range(size)])
    exchanged = sent.unflatten(1, (size, -1)).transpose(0, 1).flatten(1)
    assert torch.equal(received, exchanged)
    assert size == 1 or not torch.equal(received, sent)


def test_sizes_round_to_whole_elements() -> None:
    def count(collective: str, nbytes: int) -> int:
        return cases.Case(collective, nbytes, "float32", "-", 3).count

    assert [count("broadcast", n) for n in (1, 7, 8)] == [1, 1, 2]
    for collective in ("allgather", "alltoall", "reducescatter"):
        assert [count(collective, n) for n in (1, 12, 16)] == [3, 3, 6]


def test_bus_bandwidth() -> None:
    def case(collective: str, op: str = "-", tensors: int = 1) -> cases.Case:
        return cases.Case(collective, 4_000_000, "float32", op, 4, tensors)

    assert case("allreduce", "sum").algbw(0.001) == 4.0
    assert case("allreduce", "sum").busbw(0.001) == 6.0
    assert case("allgather").busbw(0.001) == 3.0
    assert case("alltoall").busbw(0.001) == 3.0
    assert case("reducescatter", "sum").busbw(0.001) == 3.0
    assert case("broadcast").busbw(0.001) == 4.0
    assert case("allreduce", "sum", tensors=10).busbw(0.01) == 6.0


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(v) for v in range(200, 0, -1)]
    assert measure.percentile(values, 0.99) == 198.0
    assert measure.percentile([7.0], 0.99) == 7.0


class Wrong(peers.Peer):
    """A library of one rank that spoils the last two elements."""

    name = "wrong"

    def allreduce_(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        tensor[-2:] += 1
        return tensor


def test_wrong_elements_are_counted_in_every_sample() -> None:
    peer = Wrong()
    peer.prepare(cases.Case("allreduce", 400, "float32", "sum", 1), rank=0)
    assert [peer.sample(lambda: None)[1] for _ in range(3)] == [2, 2, 2]


def test_arena_tensors_are_made_by_shared_empty() -> None:
    made = []

    def shared_empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty(*size, dtype=dtype))
        return made[-1]

    peer = peers.HvdtorchArena()
    peer._hvd = SimpleNamespace(
        shared_empty=shared_empty, allreduce_=lambda tensor, name, op: tensor
    )
    peer._ops = {"sum": 1}
    peer.prepare(cases.Case("allreduce", 400, "bfloat16", "sum", 1, tensors=1), rank=0)
    (tensor,) = made
    assert peer._run()[0] is tensor
    assert torch.equal(tensor, peer._expected[0])


def row(us: float, peer: str, nbytes: int, tensors: int = 1, **changed: object) -> report.Row:
    case = cases.Case("allreduce", nbytes, "float32", "sum", 2, tensors)
    timings = [
        measure.Timing("hvdtorch", 9, 100, 100, 0),
        measure.Timing(peer, 9, us, us, 0),
    ]
    return replace(report.rows_of(case, timings)[1], **changed)


def found(rows: list[report.Row], size: int = 2) -> dict[str, tuple[float, bool]]:
    return {v.goal: (round(v.found, 6), v.met) for v in goals.verdicts(rows, size)}


def test_goals_are_judged_by_the_best_of_the_peers_they_name() -> None:
    table = [
        row(10, "hvdtorch", 4, p99_us=101.0),
        row(30, "gloo", 4),
        row(900, "horovod-gloo", 4),
        row(190, "horovod-mpi", 4),
    ]
    assert found(table) == {
        "4 B of hvdtorch, share of Gloo's time": (0.333333, True),
        "4 B of hvdtorch, share of Horovod's best time": (0.052632, False),
        "4 B, p99 over median": (10.1, False),
    }
    table = [row(25, "hvdtorch", 4096), row(110, "gloo", 4096), row(99, "horovod-mpi", 4096)]
    assert found(table) == {"4 KiB of hvdtorch, share of the best peer's time": (0.252525, False)}


def test_goals_of_the_arena_of_many_tensors_and_of_bfloat16() -> None:
    table = [
        row(50, "hvdtorch", 2**26),
        row(33, "hvdtorch-arena", 2**26),
        row(100, "gloo", 2**26),
        row(20, "hvdtorch", 4000, 160),
        row(99, "gloo", 4000, 160),
        row(31, "hvdtorch", 2**25, count=2**24, dtype="bfloat16"),
    ]
    assert found(table) == {
        "64 MiB of hvdtorch, share of the best peer's time": (0.5, True),
        "64 MiB of hvdtorch-arena, share of the best peer's time": (0.33, True),
        "160 x 4 KB of hvdtorch, share of the best peer's time": (0.20202, False),
        "16777216 bfloat16, share of the time of as many float32": (0.62, False),
    }


def test_goals_depend_on_the_number_of_ranks() -> None:
    table = [row(101, "hvdtorch", 2**22), row(100, "gloo", 2**22)]
    assert [v.limit for v in goals.verdicts(table, 2)] == [0.5]
    assert [(v.limit, v.met) for v in goals.verdicts(table, 4)] == [(1.0, False)]
    assert goals.verdicts(table, 3) == []


def test_goals_say_which_peers_were_not_there() -> None:
    (verdict,) = goals.verdicts([row(20, "hvdtorch", 4096), row(100, "gloo", 4096)], 2)
    assert "gloo 100.0 us (not measured: horovod-gloo, horovod-mpi)" in verdict.line()


def test_goals_are_about_float32_sums_of_allreduce() -> None:
    others = ({"dtype": "int32"}, {"op": "average"}, {"collective": "broadcast"})
    for other in others:
        table = [row(20, "hvdtorch", 4096, **other), row(100, "gloo", 4096, **other)]
        assert goals.verdicts(table, 2) == []


def test_goals_option_measures_every_goal() -> None:
    made = collectives.make_cases(collectives.parse(["--goals"]), 2)
    rows = []
    for case in made:
        for peer in ("hvdtorch", "hvdtorch-arena", *goals.ANYONE):
            timings = [measure.Timing("hvdtorch", 9, 1, 1, 0), measure.Timing(peer, 9, 1, 1, 0)]
            rows.append(report.rows_of(case, timings)[1])
    per_size = {size: sum(len(goal.nbytes) for goal in goals.GOALS[size]) for size in (2, 4)}
    assert len(goals.verdicts(rows, 2)) == per_size[2] + 2  # the tail, bfloat16
    assert len(goals.verdicts(rows, 4)) == per_size[4]


def test_plot_is_a_png(tmp_path: Path) -> None:
    rows = [row(us, peer, n) for n in (4, 4096) for us, peer in ((9, "hvdtorch"), (30, "gloo"))]
    rows += [row(us, peer, 4000, 160) for us, peer in ((9, "hvdtorch"), (30, "gloo"))]
    document = machine.head("collectives") | {"np": 2, "rows": [asdict(r) for r in rows]}
    plot.draw(document, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
