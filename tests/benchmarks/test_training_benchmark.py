"""benchmarks/training.py: the whole of it on two ranks, and the parts its claims rest on.

No time is asserted: times belong to machines.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import training
from bench_tools import machine
from bench_tools.rounds import Series
from support.processes import REPOSITORY
from support.scripts import run_script
from training_bench import models, plot, reference, report, trainers

SCRIPT = REPOSITORY / "benchmarks" / "training.py"
STEPS = training.PREFIX


@pytest.mark.timeout(240)
def test_run_on_two_ranks_writes_checked_rows(tmp_path: Path, fake_horovod: Path) -> None:
    file = tmp_path / "out.json"
    options = "--np 2 --models deep --samples 2 --burst 1 --seconds 0.1 --idle-seconds 0.5"
    options += " --peers ddp-gloo,horovod-gloo"
    args = [*options.split(), "--horovod-python", str(fake_horovod), "--json", str(file)]
    job = run_script(1, SCRIPT, timeout=230, args=args)
    assert job.returncode == 0, job.outputs
    document = json.loads(file.read_text())
    rows = {row["trainer"]: row for row in document["rows"]}
    assert list(rows) == ["independent", "hvdtorch", "ddp-gloo", "horovod-gloo"]
    assert {(r["tensors"], r["parameters"], r["samples"]) for r in rows.values()} == {
        (244, 743_626, 2)
    }
    baseline = rows.pop("independent")
    assert (baseline["ratio"], baseline["same_weights"], baseline["loss_off_by"]) == (1, None, None)
    assert all(row["same_weights"] for row in rows.values())
    assert all(row["loss_off_by"] <= report.LOSS_TOLERANCE for row in rows.values())
    assert [row["trainer"] for row in document["alone"]] == ["independent", "hvdtorch"]
    names = document["idle"]["switches"]
    assert {"hvd-control", "hvd-executor"} <= names.keys()
    assert len(document["goals"]) == 5


@pytest.mark.timeout(200)
def test_a_library_that_does_not_average_is_found_out(tmp_path: Path, wrong_horovod: Path) -> None:
    file = tmp_path / "out.json"
    options = "--np 2 --models deep --samples 2 --burst 1 --seconds 0.1 --parts steps"
    args = [*options.split(), "--peers", "horovod-gloo", "--horovod-python", str(wrong_horovod)]
    job = run_script(1, SCRIPT, timeout=180, args=[*args, "--json", str(file)])
    assert job.returncode == 1, job.outputs
    right = {row["trainer"]: row["same_weights"] for row in json.loads(file.read_text())["rows"]}
    assert right == {"independent": None, "hvdtorch": True, "horovod-gloo": False}


@pytest.mark.timeout(240)
def test_horovod_trains_alike(tmp_path: Path, horovod: Path) -> None:
    file = tmp_path / "out.json"
    options = "--np 2 --models deep --samples 2 --burst 1 --seconds 0.1 --parts steps"
    args = [*options.split(), "--peers", "horovod-gloo,horovod-mpi"]
    args += ["--horovod-python", str(horovod), "--json", str(file)]
    job = run_script(1, SCRIPT, timeout=230, args=args)
    assert job.returncode == 0, job.outputs
    assert len(json.loads(file.read_text())["rows"]) == 4


class Averaging(trainers.Trainer):
    """Two ranks in one process: the other's gradients come from its own model."""

    def distribute(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        other = trainers.Independent()
        other.prepare("deep", rank=1)
        optimizer.register_step_pre_hook(lambda *_: self.average(other))
        return model, optimizer

    def average(self, other: trainers.Trainer) -> None:
        with torch.no_grad():
            for theirs, ours in zip(other._bare.parameters(), self._bare.parameters(), strict=True):
                theirs.copy_(ours)
        other._optimizer.zero_grad()
        inputs, labels = other._batches[(self._steps - 1) % models.BATCHES]
        torch.nn.functional.cross_entropy(other._model(inputs), labels).backward()
        for theirs, ours in zip(other._bare.parameters(), self._bare.parameters(), strict=True):
            ours.grad = (ours.grad + theirs.grad) / 2


def test_losses_of_the_reference_are_those_of_averaged_gradients_only() -> None:
    expected = reference.losses("deep", rank=0, size=2, steps=STEPS)
    found = {}
    for trainer in (Averaging(), trainers.Independent()):
        trainer.prepare("deep", rank=0)
        losses = trainer.losses(STEPS)
        off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        found[type(trainer).__name__] = off <= report.LOSS_TOLERANCE
    assert found == {"Averaging": True, "Independent": False}


def test_models_are_what_their_names_promise() -> None:
    def size(name: str) -> tuple[int, int]:
        parameters = list(models.make(name).parameters())
        return len(parameters), sum(p.numel() for p in parameters)

    assert size("deep") == (244, 743_626)
    assert size("wide") == (18, 22_969_866)
    for name in ("deep", "wide"):
        ((inputs, labels), *_) = models.batches(name, rank=1)
        assert models.make(name)(inputs).shape == (len(labels), models.CLASSES)
        assert not torch.equal(inputs, models.batches(name, rank=0)[0][0])


def rows(model: str, ours_ms: float) -> list[report.Row]:
    times = {"independent": 100.0, "hvdtorch": ours_ms}
    found = [
        (name, Series([int(ms * 1e6)] * 3, 0), 0.0 if name == "hvdtorch" else None, None)
        for name, ms in times.items()
    ]
    return report.rows_of(model, 244, 1000, found)


def test_a_row_is_judged_against_independent_processes() -> None:
    (_, ours) = rows("deep", 110.0)
    assert (ours.ratio, round(ours.us_per_tensor, 3)) == (1.1, round(10_000 / 244, 3))
    verdicts = list(report.step_verdicts(rows("deep", 110.0), size=2))
    assert [(v.limit, v.met) for v in verdicts] == [(1.10, True), (2.0, False)]
    verdicts = list(report.step_verdicts(rows("wide", 126.0), size=2))
    assert [(v.limit, v.met) for v in verdicts] == [(1.25, False)]
    assert list(report.step_verdicts(rows("deep", 110.0), size=4)) == []
    assert [v.met for v in report.alone_verdicts(rows("deep", 100.4))] == [True]


def test_rows_are_wrong_when_weights_or_losses_differ() -> None:
    series = Series([1], 0)
    found = [
        ("independent", series, None, None),
        ("a", series, 0.0, False),
        ("b", series, 2e-3, True),
        ("c", series, 1e-4, True),
    ]
    assert [row.wrong for row in report.rows_of("deep", 1, 1, found)] == [False, True, True, False]


def test_context_switches_of_threads_are_counted_by_name() -> None:
    code = """
import threading, time, ctypes
from training_bench import idle
def sleep():
    ctypes.CDLL(None).prctl(15, b"sleeper")
    for _ in range(20):
        time.sleep(0.01)
    time.sleep(9)
threading.Thread(target=sleep, daemon=True).start()
time.sleep(0.5)
print([t.switches >= 20 for t in idle.threads() if t.name == "sleeper"], len(idle.threads()) > 1)
"""
    environment = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'benchmarks'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.decode() == "[True] True\n", done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--models vgg", "'vgg' is none of deep, wide"),
        ("--models none", "--models is empty"),
        ("--parts none", "--parts is empty"),
        ("--peers gloo", "'gloo' is none of ddp-gloo"),
        ("--peers horovod-gloo", "need --horovod-python"),
        ("--burst 0", "--burst must be above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        training.parse(options.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_plot_is_a_png(tmp_path: Path) -> None:
    table = [asdict(row) for row in [*rows("deep", 110.0), *rows("wide", 120.0)]]
    plot.draw(machine.head("training") | {"np": 2, "rows": table}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
