"""`horovod.run`: a function called on every rank of a new job."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import TAG, clean_environment, kill_tagged, new_tag, wait_untagged

from hvdtorch.launch.function import run


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a user's script; `run` passes its own on."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    for name, text in clean_environment().items():
        monkeypatch.setenv(name, text)


@pytest.mark.parametrize("np", [1, 3])
def test_results_come_in_rank_order(np: int) -> None:
    offset = 10  # a closure

    def function(a: int, b: int) -> tuple[int, int, float]:
        import torch

        import hvdtorch as hvd

        hvd.init()
        total = hvd.allreduce(torch.tensor(float(a + b + hvd.rank())), op=hvd.Sum)
        return hvd.rank(), hvd.size(), offset + total.item()

    total = 10 + sum(3 + rank for rank in range(np))
    assert run(function, (1,), {"b": 2}, num_proc=np) == [(rank, np, total) for rank in range(np)]


def test_modules_are_found_where_the_caller_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def answer(): return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    assert run(only_here.answer, num_proc=2) == [42, 42]


def test_a_rank_that_raises_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def function() -> int:
        rank = int(os.environ["RANK"])
        if rank == 1:
            raise KeyError("no such batch")
        return rank

    with pytest.raises(RuntimeError) as raised:
        run(function, num_proc=2)
    text = str(raised.value)
    assert "the job ended with status 1" in text
    assert "rank 1: Traceback" in text and "KeyError: 'no such batch'" in text
    assert "[1]<stderr>:KeyError: 'no such batch'" in capfd.readouterr().err


def test_a_rank_that_exits_without_a_result_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"status 2\nrank 0: it ended without a result"):
        run(sys.exit, (2,))


def test_output_and_flags_go_to_hvdrun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def function() -> str:
        print("hello")
        return os.environ["HVDTORCH_INTERFACE"] + os.environ["HVDTORCH_START_TIMEOUT"]

    results = run(
        function,
        num_proc=1,
        hosts="localhost:2",
        start_timeout=40,
        output_filename=str(tmp_path),
        network_interfaces=["lo", "eth0"],
        use_gloo=True,
        disable_cache=True,
        verbose=1,
    )
    assert results == ["lo,eth040"]
    assert (tmp_path / "rank.0" / "stdout").read_text() == "[0]<stdout>:hello\n"
    assert "rank 0 is process" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"hosts": "a:1", "hostfile": "f"}, ValueError, "hosts or hostfile, not both"),
        ({"use_gloo": True, "use_mpi": True}, ValueError, "use_gloo or use_mpi, not both"),
        ({"use_mpi": True}, ValueError, "works without MPI"),
        ({"mpi_args": "-x"}, ValueError, "works without MPI"),
        ({"num_proc": 0}, ValueError, "hvdrun refused its arguments"),
        ({"min_num_proc": 1}, NotImplementedError, "min_num_proc: elastic jobs"),
        ({"ssh_port": 22}, NotImplementedError, "ssh_port: elastic jobs and other hosts"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_are_refused(arguments: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        run(print, **arguments)


def test_old_names_are_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="np is deprecated: use num_proc") as warned:
        assert run(len, ((),), np=2) == [0, 0]
    assert warned[0].filename == __file__
    with (
        pytest.warns(DeprecationWarning, match="use network_interfaces"),
        pytest.raises(ValueError, match="not both"),
    ):
        run(len, network_interface="lo", hosts="a:1", hostfile="b")


def test_an_interrupted_call_leaves_no_process() -> None:
    script = """
import signal, time
from hvdtorch.launch.function import run
def sleep():
    print("ready", flush=True)
    time.sleep(1000)
def interrupt(*_):
    raise InterruptedError("enough")
signal.signal(signal.SIGUSR1, interrupt)
run(sleep, num_proc=2)
"""
    tag = new_tag()
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=clean_environment() | {TAG: tag},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for _ in range(2):
            assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "InterruptedError: enough" in errors
        assert wait_untagged(tag, 10.0) == []
    finally:
        kill_tagged(tag)
        process.wait()
