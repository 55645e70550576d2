"""The stall report: who keeps the others waiting, told once, and `hvd.expected_stall`.

Rank 0 writes the report. In these scripts its stderr is a file, in which the rank that others wait
for can see that it has been reported.
"""

import re

import pytest
from support.scripts import run_script

START = """
import os, time, warnings
rank = int(os.environ["RANK"])
if rank == 0:
    os.dup2(os.open(os.environ["REPORT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
import torch
import hvdtorch as hvd

def await_report(text):
    while not os.path.exists(os.environ["REPORT"]) or text not in open(os.environ["REPORT"]).read():
        time.sleep(0.02)

x = torch.tensor([float(rank)])
"""
HEADER = "some ranks wait for operations that others have not submitted"


def at(script: str, text: str) -> str:
    """The first line of the script that contains `text`, as a report says it."""
    lines = (START + script).split("\n")
    return f"(script.py:{next(i for i, line in enumerate(lines, 1) if text in line)})"


@pytest.fixture
def run(tmp_path):
    """Runs a script; returns what rank 0 wrote to stderr, and the result."""

    def run(np, script, warn=0.5, stop=0.0, **settings):
        report = tmp_path / "report"
        environment = {
            "REPORT": str(report),
            "HVDTORCH_STALL_CHECK_TIME_SECONDS": str(warn),
            "HVDTORCH_STALL_SHUTDOWN_TIME_SECONDS": str(stop),
            **{f"HVDTORCH_{name}": value for name, value in settings.items()},
        }
        result = run_script(np, START + script, env=environment)
        text = report.read_text()
        assert set(result.returncodes) == {0}, result.stdout + text
        return text, result

    return run


OTHER_NAME = """
hvd.init()
if rank == 2:
    v = hvd.allreduce_async(x, name="v", op=hvd.Sum)
    await_report("allreduce.w")
    await_report("allreduce.v")
    time.sleep(1.2)  # would be reported again
    w = hvd.allreduce_async(x, name="w", op=hvd.Sum)
else:
    w = hvd.allreduce_async(x, op=hvd.Sum, name="w")
    w.wait()
    v = hvd.allreduce_async(x, name="v", op=hvd.Sum)
assert hvd.synchronize(w).item() == hvd.synchronize(v).item() == 6
"""


def test_another_name_is_reported_with_who_waits_for_what(run):
    text, _ = run(4, OTHER_NAME, warn=1)
    w, v = at(OTHER_NAME, 'hvd.Sum, name="w"'), at(OTHER_NAME, 'name="v"')
    waits = (
        f"\n  rank 2 has not submitted allreduce.w {w}, for which ranks 0, 1, 3 have waited for "
    )
    assert text.count(waits) == text.count("not submitted allreduce.w") == 1, text
    assert text.count("not submitted allreduce.v") == 1, text
    assert re.search(rf"\n  rank 2 \(host \S+\) waits for allreduce\.v {re.escape(v)}", text), text
    assert 1 <= text.count(HEADER) <= 2 and "hvd.expected_stall()" in text, text


STOP = """
hvd.init()
if rank == 2:  # the later one, so that it is the others' operation that stops the job
    time.sleep(0.3)
try:
    hvd.allreduce(x, name="v" if rank == 2 else "w")
except hvd.HorovodInternalError as error:
    print("SEEN", repr(str(error)), flush=True)
try:
    hvd.barrier()
except hvd.HorovodInternalError as error:
    assert "stalled" in str(error), error
else:
    raise AssertionError("no error")
hvd.shutdown()
hvd.init()
assert hvd.allreduce(x, op=hvd.Sum).item() == 6
"""


def test_the_job_ends_after_the_shutdown_time(run):
    text, result = run(4, STOP, warn=0.5, stop=1)
    assert text.count(HEADER) >= 1, text
    for rank, output in enumerate(result.outputs):
        name = "v" if rank == 2 else "w"
        assert f"SEEN 'allreduce.{name} cannot complete: the job was stopped: it stalled" in output
        assert "for 1 s (HVDTORCH_STALL_SHUTDOWN_TIME_SECONDS)" in output
        where = at(STOP, "hvd.allreduce(")
        assert f"rank 2 has not submitted allreduce.w {where}" in output, output
        assert re.search(rf"rank 2 \(host \S+\) waits for allreduce\.v {re.escape(where)}", output)


def late(wait: str, rank: int = 0) -> str:
    """A script in which this rank comes late to `w`."""
    return f"""
hvd.init()
hvd.allreduce(x, name="first")
if rank == {rank}:
    {wait}
assert hvd.allreduce(x, name="w", op=hvd.Sum).item() == sum(range(hvd.size()))
hvd.barrier()
"""


def test_a_late_rank_is_reported_once_and_the_result_is_right(run):
    wait = 'await_report("allreduce.w"); time.sleep(1.2)'
    script = late(wait)
    text, result = run(4, script, LOG_LEVEL="info")
    assert text.count(HEADER) == 1, text
    w = at(script, 'name="w"')
    assert f"rank 0 has not submitted allreduce.w {w}, for which ranks 1-3" in text, text
    first = re.escape(at(script, 'name="first"'))
    assert re.search(rf"rank 0 \(host \S+\) last submitted allreduce\.first {first}, ", text), text
    assert (text + result.stdout).count("no longer stalled: allreduce.w") == 1, text


@pytest.mark.parametrize("rank", [0, 1])
def test_an_expected_stall_is_not_reported_and_does_not_end_the_job(run, rank):
    wait = """
    with hvd.expected_stall(30):
        with hvd.expected_stall(0.1):
            pass
        time.sleep(1.7)
"""
    text, _ = run(3, late(wait, rank), warn=0.5, stop=1)
    assert text == ""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "wait",
    [
        """
    with hvd.expected_stall(1):
        await_report("allreduce.w")
""",
        """
    with hvd.expected_stall(30):
        time.sleep(0.7)
    await_report("allreduce.w")
""",
    ],
    ids=["too short", "over"],
)
def test_after_an_expected_stall_the_clock_starts_anew(run, wait, rank):
    text, _ = run(2, late(wait, rank))
    assert f"rank {rank} has not submitted allreduce.w" in text, text


def test_the_arguments_of_expected_stall(run):
    text, _ = run(
        2,
        """
def enter(seconds):
    with hvd.expected_stall(seconds):
        pass

try:
    enter(1)
except hvd.HorovodInternalError as error:
    assert "call hvd.init() first" in str(error), error
else:
    raise AssertionError("no error")
hvd.init()
for wrong in (0, -1, float("nan"), "1", None):
    try:
        enter(wrong)
    except ValueError as error:
        assert f"a positive number, not {wrong!r}" in str(error), error
    else:
        raise AssertionError(f"no error for {wrong}")
enter(float("inf"))
enter(1e300)
with hvd.expected_stall(5):
    hvd.shutdown()
""",
    )
    assert text == ""


@pytest.mark.parametrize(
    ("others", "odd", "hint"),
    [
        (
            'hvd.grouped_allreduce([x] * 3, name="g")',
            'hvd.grouped_allreduce([x] * 2, name="g")',
            "its grouped_allreduce of 2 tensors 'g' meant to be the grouped_allreduce of 3 tensors",
        ),
        (
            'hvd.allreduce(x, name="n")',
            'hvd.broadcast(x, 0, name="n")',
            "its broadcast 'n' meant to be the allreduce 'n' of the others?",
        ),
        (
            'hvd.grouped_allreduce([x] * 2, name="n")',
            'hvd.allreduce(x, name="n")',
            "its allreduce 'n' meant to be the",
        ),
    ],
    ids=["length of a group", "kind", "a group and none"],
)
def test_one_name_for_different_things_gives_a_hint(run, others, odd, hint):
    _, result = run(
        3,
        f"""
hvd.init()
hvd.barrier()
try:
    if rank == 1:  # the later one, so that it is the others' operation that is reported
        time.sleep(0.3)
    {odd} if rank == 1 else {others}
except hvd.HorovodInternalError as error:
    print(error, flush=True)
""",
        warn=1.5,
        stop=1.5,
    )
    for output in result.outputs:
        assert hint in output and "All ranks must call the same collective" in output, output
        assert output.count("rank 1 (host ") == 1, output


@pytest.mark.parametrize(
    "settings", [{"STALL_CHECK_DISABLE": "1", "stop": 0.5}, {"LOG_LEVEL": "error"}, {"warn": 0}]
)
def test_nothing_is_reported_where_it_is_switched_off(run, settings):
    text, _ = run(4, late("time.sleep(1.2)"), **settings)
    assert text == ""


def test_a_stall_ends_the_job_at_any_log_level(run):
    text, result = run(4, STOP, warn=0.5, stop=0.5, LOG_LEVEL="fatal")
    assert text == "" and all("SEEN" in output for output in result.outputs), text


def test_a_joined_rank_is_not_missing(run):
    text, _ = run(
        4,
        """
hvd.init()
if rank == 3:
    hvd.join()
else:
    if rank == 1:
        await_report("allreduce.w")
    assert hvd.allreduce(x, name="w", op=hvd.Sum).item() == 3
    hvd.join()
""",
    )
    assert text.count(HEADER) == 1, text
    assert "rank 1 has not submitted allreduce.w" in text and "ranks 0, 2 have waited" in text, text
    assert re.search(r"rank 1 \(host \S+\) last submitted hvd\.init", text), text
    assert not re.search("rank 3 (has not|.host)", text), text


def test_a_rank_that_joined_ones_wait_for_in_vain(run):
    text, _ = run(
        3,
        """
hvd.init()
if rank == 1:
    hvd.allreduce(x, name="w")
    await_report("join.noname")
else:
    hvd.allreduce(x, name="w")
hvd.join()
""",
    )
    assert text.count(HEADER) == 1, text
    assert re.search(r"rank 1 has not submitted join\.noname .*ranks 0, 2 have waited", text), text
    assert re.search(r"rank 1 \(host \S+\) last submitted allreduce\.w", text), text


def test_operations_of_process_sets(run):
    script = """
hvd.init()
pair, other = hvd.add_process_set([1, 2]), hvd.add_process_set([1, 3])
if rank == 2:
    await_report("allreduce.w")
elif other.included():
    assert hvd.allreduce(x, name="w", op=hvd.Sum, process_set=other).item() == 4
if pair.included():
    assert hvd.allreduce(x, name="w", op=hvd.Sum, process_set=pair).item() == 3
hvd.barrier()
"""
    text, _ = run(4, script)
    w = at(script, "process_set=pair")
    assert (
        f"rank 2 has not submitted allreduce.w in process set 1 {w}, for which rank 1 has" in text
    ), text


def test_process_sets_added_on_some_ranks_only(run):
    script = """
hvd.init()
if rank == 1:
    await_report("process_sets")
hvd.add_process_set([0, 1])
hvd.barrier()
"""
    text, _ = run(3, script)
    where = at(script, "add_process_set")
    assert f"rank 1 has not submitted process_sets {where}, for which ranks 0, 2" in text, text


def test_barriers_and_many_names(run):
    text, _ = run(
        2,
        """
hvd.init()
if rank == 0:
    handles = [hvd.allreduce_async(x, name=f"n{i}", op=hvd.Sum) for i in range(20)]
    hvd.barrier()
else:
    await_report(" more, for which")
    handles = [hvd.allreduce_async(x, name=f"n{i}", op=hvd.Sum) for i in range(20)]
    hvd.barrier()
assert all(hvd.synchronize(handle).item() == 1 for handle in handles)
""",
    )
    assert text.count(HEADER) == 1, text
    assert text.count("allreduce.n") == 6 and re.search(r"and 1[45] more", text), text


def test_a_shutdown_time_below_the_warning_time_is_said_to_be_ignored(run):
    wait = 'await_report("allreduce.w"); time.sleep(0.5)'
    text, _ = run(4, late(wait), warn=1, stop=0.3)
    assert text.count(HEADER) == 1, text
    assert "ignoring HVDTORCH_STALL_SHUTDOWN_TIME_SECONDS: 0.3 s are less than the 1 s" in text
    assert "rank 0 has not submitted allreduce.w" in text
