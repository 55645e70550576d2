"""How jobs end: deaths, exceptions, exits without shutdown, cycles of init and shutdown, idling."""

import re
import signal

import pytest
from support.scripts import run_script

# Every survivor must see the end of rank 2 and name it. A survivor prints its error and exits 0.
DEATH = """
import os, signal, sys, time
import torch
import hvdtorch as hvd

hvd.init()
x = torch.ones({numel})
try:
    for step in range(1000000):
        if hvd.rank() == 2 and step == {step}:
            {death}
        hvd.allreduce(x, name="w")
except hvd.HorovodInternalError as error:
    if hvd.rank() == 2:
        raise
    seen = time.time()
    died = float(open(os.environ["MARK"]).read())
    assert seen - died < 5, seen - died
    print("SEEN", error, flush=True)
"""

MARK = 'open(os.environ["MARK"], "w").write(str(time.time()))'


def run_death(tmp_path, death, step=5, numel=10, **kwargs):
    source = DEATH.format(death=f"{MARK}; {death}", step=step, numel=numel)
    return run_script(3, source, env={"MARK": str(tmp_path / "mark")}, **kwargs)


@pytest.mark.parametrize("numel", [10, 300_000], ids=["inside the log", "by the transport"])
@pytest.mark.parametrize("step", [0, 5])
def test_sigkill_is_seen_and_named(tmp_path, step, numel):
    result = run_death(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", step, numel)
    assert result.returncodes == [0, 0, -signal.SIGKILL]
    for output in result.outputs[:2]:
        # A survivor that is late learns of the death at its next call, not in the middle of one.
        assert re.search(r"SEEN (allreduce.w cannot complete|this job .*): rank 2 \(host ", output)
        assert "is gone without a goodbye: it was killed or crashed" in output


def test_an_exception_is_passed_on(tmp_path):
    result = run_death(tmp_path, "raise ValueError('bad batch')")
    assert result.returncodes == [0, 0, 1]
    for output in result.outputs[:2]:
        assert "rank 2 (host " in output
        assert "has left the job after ValueError: bad batch (script.py:11)" in output


def test_exit_before_the_first_collective(tmp_path):
    result = run_death(tmp_path, "sys.exit(3)", step=0)
    assert result.returncodes == [0, 0, 3]
    for output in result.outputs[:2]:
        assert "rank 2 (host " in output and "has left the job" in output


@pytest.mark.parametrize(
    ("death", "status"),
    [("sys.exit(3)", 3), ("raise ValueError('bad batch')", 1), ("os.kill(os.getpid(), 9)", 137)],
)
def test_hvdrun_gives_the_status_of_the_rank_that_died(tmp_path, death, status):
    result = run_death(tmp_path, death, launcher="hvdrun")
    assert result.returncode == status, result.stdout


def test_the_coordinator_dies_during_a_transfer():
    result = run_script(
        3,
        """
        import os, signal, threading, time
        import torch
        import hvdtorch as hvd

        hvd.init()
        x = torch.ones(30_000_000)
        if hvd.rank() == 0:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                hvd.allreduce_(x, name="big")
        except hvd.HorovodInternalError as error:
            print("SEEN", error, flush=True)
        """,
    )
    assert result.returncodes == [-signal.SIGKILL, 0, 0]
    for output in result.outputs[1:]:
        assert "SEEN allreduce.big cannot complete: rank 0 (host " in output


def test_after_a_death_calls_raise_and_shutdown_returns():
    result = run_script(
        2,
        """
        import os
        import torch
        import hvdtorch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(2))
        if hvd.rank() == 1:
            os._exit(7)
        for _ in range(2):
            try:
                hvd.allreduce(torch.ones(2))
            except hvd.HorovodInternalError as error:
                assert "rank 1" in str(error), error
            else:
                raise AssertionError("no error")
        assert hvd.is_initialized() and hvd.size() == 2
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        """,
    )
    assert result.returncodes == [0, 7], result.stdout


@pytest.mark.parametrize("np", [1, 2, 3])
def test_a_script_that_never_calls_shutdown(np):
    result = run_script(
        np,
        """
        import torch
        import hvdtorch as hvd

        hvd.init()
        assert hvd.allreduce(torch.ones(100_000), op=hvd.Sum).eq(hvd.size()).all()
        """,
    )
    assert set(result.returncodes) == {0}, result.stdout


def test_raising_right_after_an_async_operation_keeps_the_status():
    result = run_script(
        2,
        """
        import torch
        import hvdtorch as hvd

        hvd.init()
        handle = hvd.allreduce_async(torch.ones(1_000_000))
        raise KeyError("mine")
        """,
    )
    assert result.returncodes == [1, 1]
    assert all("KeyError: 'mine'" in output for output in result.outputs)


def test_cycles_of_init_and_shutdown_leave_nothing():
    result = run_script(
        2,
        """
        import os, time
        import torch
        import hvdtorch as hvd

        def count():
            return {name: len(os.listdir(path)) for name, path in
                    (("threads", "/proc/self/task"), ("fds", "/proc/self/fd"), ("shm", "/dev/shm"))}

        counts = []
        for _ in range(20):
            hvd.init()
            assert hvd.allreduce(torch.ones(3), name="x").eq(1).all()
            big = torch.full((200_000,), float(hvd.rank()))
            assert hvd.allreduce(big, name="big").eq((hvd.size() - 1) / 2).all()
            hvd.shutdown()
            deadline = time.monotonic() + 5
            while counts and count() != counts[0] and time.monotonic() < deadline:
                time.sleep(0.01)  # threads of Gloo take a moment to go
            counts.append(count())
        assert counts[1:] == counts[:1] * 19, counts
        """,
    )
    assert result.returncodes == [0, 0], result.stdout


IDLE = """
import os, time
import torch
import hvdtorch as hvd
from hvdtorch import _C

def switches():
    total = []
    for thread in _C.runtime_threads():
        lines = open(f"/proc/self/task/{thread}/status").read().splitlines()
        total.append([line for line in lines if "ctxt_switches" in line])
    return total

hvd.init()
if %s:
    hvd.allreduce(torch.ones(100_000))
    hvd.barrier()
time.sleep(0.5)  # the threads reach their sleep
before = switches()
assert len(before) == 2
time.sleep(5)
after = switches()
# No control message may reach a rank that has not looked yet: meet through files.
open(f"{os.environ['MARK']}.{hvd.rank()}", "w").close()
while not all(os.path.exists(f"{os.environ['MARK']}.{rank}") for rank in range(hvd.size())):
    time.sleep(0.01)
assert after == before, (before, after)
"""


@pytest.mark.parametrize("np", [1, 2])
@pytest.mark.parametrize("used", [False, True])
def test_idle_threads_do_not_wake(tmp_path, np, used):
    result = run_script(np, IDLE % used, env={"MARK": str(tmp_path / "mark")})
    assert set(result.returncodes) == {0}, result.stdout


def test_ctrl_c_interrupts_a_wait():
    result = run_script(
        2,
        """
        import os, signal, threading
        import torch
        import hvdtorch as hvd

        # A shell starts background jobs with Ctrl-C ignored, and their children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        hvd.init()
        if hvd.rank() == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            handle = hvd.allreduce_async(torch.ones(2), name="x")
            try:
                hvd.synchronize(handle)
            except KeyboardInterrupt:
                print("INTERRUPTED")
        hvd.barrier()
        if hvd.rank() == 1:
            assert hvd.allreduce(torch.ones(2), name="x").tolist() == [1, 1]
        hvd.barrier()
        """,
    )
    assert result.returncodes == [0, 0], result.stdout
    assert "INTERRUPTED" in result.outputs[0]


def test_a_forked_child_may_not_run_collectives_and_does_not_hide_its_parents_death(tmp_path):
    result = run_script(
        2,
        """
        import os, signal, time
        import torch
        import hvdtorch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(100_000))
        if hvd.rank() == 1:
            child = os.fork()
            if child == 0:
                for call in (lambda: hvd.allreduce(torch.ones(2)), hvd.init):
                    try:
                        call()
                        os._exit(1)
                    except hvd.HorovodInternalError as error:
                        assert "forked child of rank 1" in str(error)
                    hvd.shutdown()  # is the parent's to do: does nothing here
                assert hvd.rank() == 1  # asking is allowed
                open(os.environ["MARK"] + ".child", "w").close()
                time.sleep(60)
                os._exit(0)
            while not os.path.exists(os.environ["MARK"] + ".child"):
                time.sleep(0.01)
            hvd.broadcast_object(child, 1)
            hvd.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        child = hvd.broadcast_object(None, 1)
        hvd.barrier()
        try:
            hvd.allreduce(torch.ones(2))
        except hvd.HorovodInternalError as error:
            assert "rank 1" in str(error), error
        else:
            raise AssertionError("no error")
        os.kill(child, signal.SIGKILL)  # ProcessLookupError if it was not there any more
        """,
        env={"MARK": str(tmp_path / "mark")},
    )
    assert result.returncodes == [0, -signal.SIGKILL], result.stdout


@pytest.mark.parametrize("first", ["hvd", "dist"])
@pytest.mark.parametrize("launcher", ["python", "torchrun", "hvdrun"])
def test_beside_torch_distributed(first, launcher):
    result = run_script(
        2,
        f"""
        import torch
        import torch.distributed as dist
        import hvdtorch as hvd

        start = [hvd.init, lambda: dist.init_process_group("gloo")]
        for call in start if {first!r} == "hvd" else reversed(start):
            call()
        x = torch.full((1000,), float(hvd.rank()))
        handle = hvd.allreduce_async(x, name="x", op=hvd.Sum)
        y = x.clone()
        dist.all_reduce(y)
        assert torch.equal(hvd.synchronize(handle), y) and y.eq(1).all()
        assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
        """,
        launcher=launcher,
    )
    assert result.returncode == 0, result.stdout


def test_two_simulated_hosts():
    result = run_script(
        4,
        """
        import os
        os.environ["HVDTORCH_HOST_ID"] = "ab"[int(os.environ["RANK"]) // 2]
        import torch
        import hvdtorch as hvd

        hvd.init()
        places = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
        assert places == (hvd.rank() % 2, 2, hvd.rank() // 2, 2), places
        assert hvd.allreduce(torch.ones(100_000)).eq(1).all()
        """,
    )
    assert set(result.returncodes) == {0}, result.stdout


def test_missing_ranks_are_named_when_the_start_timeout_passes():
    result = run_script(
        3,
        """
        import os, sys
        import hvdtorch as hvd

        if os.environ["RANK"] == "1":
            sys.exit(0)
        try:
            hvd.init()
        except (TimeoutError, RuntimeError) as error:
            assert "ranks [1] of 3 did not call hvd.init()" in str(error), error
        else:
            raise AssertionError("no error")
        """,
        env={"HVDTORCH_START_TIMEOUT": "3"},
    )
    assert set(result.returncodes) == {0}, result.stdout


def test_a_transfer_without_progress_fails_after_the_operation_timeout():
    result = run_script(
        2,
        """
        import os, signal, subprocess, sys
        import torch
        import hvdtorch as hvd

        hvd.init()
        x = torch.ones(20_000_000)
        hvd.allreduce_(x, name="x")
        if hvd.rank() == 1:
            # Stopped for a while, in the middle of a transfer; not dead, so no socket closes.
            wake = f"sleep 6; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {os.getpid()}; {wake}"])
        try:
            while True:
                hvd.allreduce_(x, name="x")
        except hvd.HorovodInternalError as error:
            print("SEEN", error, flush=True)
        """,
        env={"HVDTORCH_OPERATION_TIMEOUT": "2"},
    )
    assert result.returncodes == [0, 0], result.stdout
    for output in result.outputs:
        assert "SEEN allreduce.x cannot complete: " in output
        assert "reports a failed transfer" in output
