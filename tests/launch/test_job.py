"""Jobs from start to end: output, failures, signals, and that no process outlives them."""

import os
import signal
import time
from pathlib import Path

import pytest
from hvdrun_runner import HVDRUN, Hvdrun, lines_of, read_until
from support.processes import tagged

# What a rank may leave behind: children, in its own session and in others, and orphans.
START_SLEEPERS = """
import os, subprocess, sys, time
rank = int(os.environ["RANK"])
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.Popen(["sh", "-c", "sleep 1000 & exec sleep 1000 &"], start_new_session=True)
"""
SAY_READY = "print('ready', flush=True)\n"
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SLEEP = "time.sleep(1000)\n"
READY = [f"[{rank}]<stdout>:ready" for rank in range(2)]


# ---- output ----


def test_both_streams_are_labelled(hvdrun: Hvdrun) -> None:
    source = "import sys; print('o'); print('e', file=sys.stderr); sys.stdout.write('end')"
    result = hvdrun.python(2, source)
    assert lines_of(result.stdout) == [
        f"[{rank}]<stdout>:{text}" for rank in range(2) for text in ("end", "o")
    ]
    assert lines_of(result.stderr) == ["[0]<stderr>:e", "[1]<stderr>:e"]


def test_lines_are_whole_however_they_are_written(hvdrun: Hvdrun) -> None:
    source = """
import os
rank = os.environ["RANK"].encode()
for _ in range(200):
    for part in (b"<", rank * 5000, b">\\n"):
        os.write(1, part)
"""
    result = hvdrun.python(3, source)
    assert set(result.stdout.splitlines()) == {
        f"[{rank}]<stdout>:<{str(rank) * 5000}>" for rank in range(3)
    }
    assert result.stdout.count("\n") == 600


def test_a_line_is_forwarded_while_the_rank_runs(hvdrun: Hvdrun) -> None:
    process = hvdrun.start(*hvdrun.command(2, "import time\n" + SAY_READY + SLEEP))
    assert read_until(process, 2) == READY
    assert process.poll() is None


def test_timestamps(hvdrun: Hvdrun) -> None:
    result = hvdrun.python(1, "print('a')", flags=["--prefix-output-with-timestamp"])
    stamp, label, line = result.stdout.partition("[0]<stdout>:")
    assert (label, line) == ("[0]<stdout>:", "a\n")
    time.strptime(stamp, "%a %b %d %H:%M:%S %Y")


@pytest.mark.parametrize(("np", "width"), [(1, 1), (11, 2)])
def test_files_hold_what_the_console_shows(
    hvdrun: Hvdrun, tmp_path: Path, np: int, width: int
) -> None:
    source = "import sys; print('o'); print('e', file=sys.stderr)"
    result = hvdrun.python(np, source, flags=["--output-filename", str(tmp_path / "new" / "out")])
    for rank in range(np):
        folder = tmp_path / "new" / "out" / f"rank.{rank:0{width}d}"
        assert (folder / "stdout").read_text() == f"[{rank}]<stdout>:o\n"
        assert (folder / "stderr").read_text() == f"[{rank}]<stderr>:e\n"
    assert len(result.stdout.splitlines()) == len(result.stderr.splitlines()) == np


def test_standard_input_is_empty(hvdrun: Hvdrun) -> None:
    result = hvdrun.python(2, "import sys; print(repr(sys.stdin.read()))")
    assert lines_of(result.stdout) == ["[0]<stdout>:''", "[1]<stdout>:''"]


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2)])
def test_hvdrun_may_be_started_without_standard_files(
    hvdrun: Hvdrun, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    source = """
import pathlib, sys
import torch
import hvdtorch as hvd
hvd.init()
total = int(hvd.allreduce(torch.tensor(1), op=hvd.Sum))
pathlib.Path(sys.argv[1], str(hvd.rank())).write_text(str(total))
"""
    command = hvdrun.command(2, source, str(tmp_path), flags=["--start-timeout", "60"])
    closing = " ".join(f"{fd}>&-" for fd in closed)
    shell = ("sh", "-c", f'exec "$@" {closing}', "sh", *HVDRUN)
    assert hvdrun(*command, program=shell).returncode == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]


def test_ranks_inherit_no_file_but_their_own(hvdrun: Hvdrun) -> None:
    source = """
import os
found = {int(name) for name in os.listdir("/proc/self/fd")}
print(sorted(fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}")) ==
      sorted({0, 1, 2, int(os.environ["HVDTORCH_ECHO_FD"])}))
"""
    assert hvdrun.python(1, source).stdout == "[0]<stdout>:True\n"


# ---- failures ----


def test_the_job_ends_well_when_all_ranks_do(hvdrun: Hvdrun) -> None:
    # Rank 0 ends long before rank 1 does: that is no failure.
    source = "import os, time; time.sleep(0.5 * int(os.environ['RANK'])); print('done')"
    result = hvdrun.python(2, source)
    assert (result.returncode, result.stderr) == (0, "")
    assert lines_of(result.stdout) == ["[0]<stdout>:done", "[1]<stdout>:done"]


def test_the_first_failure_gives_the_status(hvdrun: Hvdrun) -> None:
    source = "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(3)\n" + SLEEP
    result = hvdrun.python(3, source)
    assert result.returncode == 3
    last = result.stderr.splitlines()[-1]
    assert last.startswith("hvdrun: rank 2 (process ")
    assert last.endswith(") exited with status 3; the job has been ended")


def test_death_by_a_signal_is_128_and_its_number(hvdrun: Hvdrun) -> None:
    source = "import os, signal, time\n"
    source += "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n" + SLEEP
    result = hvdrun.python(2, source)
    assert result.returncode == 137
    last = result.stderr.splitlines()[-1]
    assert last.startswith("hvdrun: rank 1 (process ")
    assert last.endswith(") was killed by signal 9 (SIGKILL); the job has been ended")


def test_the_others_may_say_what_they_saw_and_are_not_the_cause(
    hvdrun: Hvdrun, tmp_path: Path
) -> None:
    # Ranks 0 and 2 wait for the end of rank 1, as those do that it is connected to.
    source = """
import os, select, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]
def wait_for(name):
    while not os.path.exists(f"{folder}/{name}"): time.sleep(0.01)
if rank == "1":
    open(f"{folder}/new", "w").write(str(os.getpid()))
    os.rename(f"{folder}/new", f"{folder}/pid")
    wait_for(0); wait_for(2)
    sys.exit(9)
wait_for("pid")
peer = os.pidfd_open(int(open(f"{folder}/pid").read()))
open(f"{folder}/{rank}", "w")
select.select([peer], [], [])
sys.exit(f"rank {rank} saw it")
"""
    result = hvdrun.python(3, source, str(tmp_path))
    assert result.returncode == 9
    lines = result.stderr.splitlines()
    assert sorted(lines[:-1]) == ["[0]<stderr>:rank 0 saw it", "[2]<stderr>:rank 2 saw it"]
    assert lines[-1].startswith("hvdrun: rank 1 ")


def test_an_echo_that_exits_first_is_not_the_cause(hvdrun: Hvdrun) -> None:
    source = """
import os, sys, time
if os.environ["RANK"] == "0":
    os.write(int(os.environ["HVDTORCH_ECHO_FD"]), b"0\\n")
    sys.exit(1)
time.sleep(1.5)  # longer than the others of a real cause have
sys.exit(3)
"""
    result = hvdrun.python(2, source)
    assert result.returncode == 3
    assert result.stderr.splitlines()[-1].startswith("hvdrun: rank 1 ")


def test_if_all_are_echoes_the_first_is_the_cause(hvdrun: Hvdrun) -> None:
    source = """
import os, sys, time
rank = int(os.environ["RANK"])
os.write(int(os.environ["HVDTORCH_ECHO_FD"]), b"%d\\n" % rank)
time.sleep(0.4 * rank)
sys.exit(4 + rank)
"""
    assert hvdrun.python(2, source).returncode == 4


def test_who_does_not_end_is_killed_after_the_grace_time(hvdrun: Hvdrun) -> None:
    source = START_SLEEPERS + IGNORE_TERM + SAY_READY
    source += "if rank == 1: time.sleep(0.5); sys.exit(5)\n" + SLEEP
    result = hvdrun.python(2, source, flags=["--grace-time", "0.2"])
    assert result.returncode == 5
    assert lines_of(result.stdout) == READY


def test_what_ranks_leave_behind_ends_with_a_good_job_too(hvdrun: Hvdrun) -> None:
    result = hvdrun.python(2, START_SLEEPERS + SAY_READY)
    assert result.returncode == 0
    assert lines_of(result.stdout) == READY


def test_what_was_running_before_hvdrun_is_left_alone(hvdrun: Hvdrun) -> None:
    # The shell turns into hvdrun, and its background process is now hvdrun's child.
    script = 'sleep 1000 & echo $!; exec "$@"'
    program = ("sh", "-c", script, "sh", *HVDRUN)
    process = hvdrun.start(*hvdrun.command(1, "print('x')"), program=program)
    out = read_until(process, 2)
    assert process.wait() == 0
    (sleeper, line) = out
    assert line == "[0]<stdout>:x"
    assert tagged(hvdrun.tag) == [int(sleeper)]
    os.kill(int(sleeper), signal.SIGKILL)


# ---- signals ----


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_and_everything_below_it(
    hvdrun: Hvdrun, signum: signal.Signals, status: int
) -> None:
    process = hvdrun.start(*hvdrun.command(2, START_SLEEPERS + SAY_READY + SLEEP))
    assert read_until(process, 2) == READY
    process.send_signal(signum)
    _, err = process.communicate()
    assert process.returncode == status
    assert err.decode().splitlines()[-1] == f"hvdrun: ended by {signum.name}"
    assert hvdrun.left(0.0) == []


def test_only_main_processes_get_the_signal_so_a_save_completes(
    hvdrun: Hvdrun, tmp_path: Path
) -> None:
    # As with a DataLoader: the rank needs its child to be able to finish its step.
    source = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "input(); print('from the child')"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def save(*_):
    time.sleep(0.3)
    out, _ = child.communicate(b"\\n")
    print("saved", out.decode().strip(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True: signal.pause()
"""
    process = hvdrun.start(*hvdrun.command(2, source))
    assert read_until(process, 2) == READY
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert lines_of(out.decode()) == [f"[{rank}]<stdout>:saved from the child" for rank in range(2)]
    assert process.returncode == 143


def test_a_second_signal_kills_at_once(hvdrun: Hvdrun) -> None:
    source = START_SLEEPERS + "import signal\n"
    source += "signal.signal(signal.SIGINT, lambda *_: print('asked', flush=True))\n"
    source += SAY_READY + "while True: signal.pause()\n"
    # Without the second signal this job would last for longer than the test may.
    process = hvdrun.start(*hvdrun.command(2, source, flags=["--grace-time", "1000"]))
    assert read_until(process, 2) == READY
    process.send_signal(signal.SIGINT)
    assert read_until(process, 2) == [f"[{rank}]<stdout>:asked" for rank in range(2)]
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert hvdrun.left(0.0) == []


def test_a_signal_is_heard_while_nobody_reads_the_output(hvdrun: Hvdrun) -> None:
    source = "import os\nwhile True: os.write(1, b'x' * 1000 + b'\\n')\n"
    process = hvdrun.start(*hvdrun.command(2, source, flags=["--grace-time", "1"]))
    assert process.stdout is not None
    read_until(process, 1)
    time.sleep(0.5)  # the pipes fill up
    process.send_signal(signal.SIGTERM)
    while tagged(hvdrun.tag) != [process.pid]:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # ends the wait for a reader, too
    assert process.wait() == 143


def test_output_that_nobody_wants_ends_no_job(hvdrun: Hvdrun, tmp_path: Path) -> None:
    source = "import sys\nfor _ in range(10000): print('x' * 100)\nopen(sys.argv[1], 'w')\n"
    process = hvdrun.start(*hvdrun.command(1, source, str(tmp_path / "done")))
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 0
    assert (tmp_path / "done").exists()


def test_when_hvdrun_is_killed_everything_dies(hvdrun: Hvdrun) -> None:
    source = START_SLEEPERS.replace(", start_new_session=True", "") + SAY_READY + SLEEP
    process = hvdrun.start(*hvdrun.command(2, source))
    assert read_until(process, 2) == READY
    process.kill()
    process.wait()
    assert hvdrun.left() == []


def test_when_hvdrun_and_its_companion_are_killed_the_ranks_die(hvdrun: Hvdrun) -> None:
    process = hvdrun.start(*hvdrun.command(2, "import time\n" + SAY_READY + SLEEP))
    assert read_until(process, 2) == READY
    (companion,) = companions(hvdrun)
    os.kill(companion, signal.SIGKILL)
    process.kill()
    process.wait()
    assert hvdrun.left() == []


def test_a_job_that_needs_no_store_outlives_its_server(hvdrun: Hvdrun) -> None:
    process = hvdrun.start(*hvdrun.command(2, "import time\n" + SAY_READY + SLEEP))
    assert read_until(process, 2) == READY
    (companion,) = companions(hvdrun)
    os.kill(companion, signal.SIGKILL)
    assert process.stderr is not None
    said = os.read(process.stderr.fileno(), 4096).decode()
    assert said.startswith("hvdrun: the process that serves the rendezvous store has died")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143


def companions(hvdrun: Hvdrun) -> list[int]:
    """The processes that serve a store beside this test's hvdrun."""
    return [
        pid
        for pid in tagged(hvdrun.tag)
        if b"companion.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


# ---- beside each other ----


def test_five_jobs_at_once(hvdrun: Hvdrun) -> None:
    source = "import os; print(os.environ['MASTER_PORT'], os.environ['HVDTORCH_JOB_KEY'])"
    jobs = [hvdrun.start(*hvdrun.command(2, source)) for _ in range(5)]
    seen = set()
    for job in jobs:
        out, err = job.communicate()
        assert (job.returncode, err) == (0, b"")
        (said,) = {line.partition(":")[2] for line in out.decode().splitlines()}
        seen.add(said)
    assert len(seen) == 5


def test_the_key_is_on_no_command_line(hvdrun: Hvdrun) -> None:
    source = "import os, time; print(os.environ['HVDTORCH_JOB_KEY'], flush=True)\n" + SLEEP
    process = hvdrun.start(*hvdrun.command(1, source))
    key = read_until(process, 1)[0].partition(":")[2].encode()
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in tagged(hvdrun.tag)]
    assert len(lines) >= 3  # hvdrun, its companion, the rank
    assert not any(key in line for line in lines)


def test_an_idle_job_wakes_nobody(hvdrun: Hvdrun) -> None:
    process = hvdrun.start(*hvdrun.command(2, "import time\n" + SAY_READY + SLEEP))
    assert read_until(process, 2) == READY

    def switches() -> list[str]:
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return [line for line in status if line.startswith("voluntary")]

    time.sleep(1.0)
    before = switches()
    time.sleep(2.0)
    assert switches() == before


def test_torch_distributed_starts_on_the_store_that_hvdrun_serves(hvdrun: Hvdrun) -> None:
    source = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(x)
print(x.item())
dist.destroy_process_group()
"""
    result = hvdrun.python(2, source)
    assert (result.returncode, lines_of(result.stdout)) == (
        0,
        ["[0]<stdout>:3", "[1]<stdout>:3"],
    ), result.stderr


def test_the_store_listens_on_the_loopback_interface_only(hvdrun: Hvdrun) -> None:
    source = "import os, time; print(os.environ['MASTER_PORT'], flush=True)\n" + SLEEP
    process = hvdrun.start(*hvdrun.command(1, source))
    port = int(read_until(process, 1)[0].partition(":")[2])
    table = Path("/proc/net/tcp").read_text().split("\n")[1:]
    listening = {line.split()[1] for line in table if line and line.split()[3] == "0A"}
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
