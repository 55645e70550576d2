"""The examples, run as a user would: under each launcher, to the end; their results checked."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import REPOSITORY, clean_environment
from support.scripts import Launcher, run_script

EXAMPLES = REPOSITORY / "examples"
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
SECONDS = 240.0


def run_blocked(blocked: str, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run an example in a process where `import <blocked>` fails."""
    code = (
        "import runpy, sys; sys.modules[sys.argv[1]] = None; del sys.argv[:2];"
        f"sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, blocked, str(EXAMPLES / script), *args]
    return subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    ("launcher", "np"),
    [("python", 1), ("torchrun", 2), ("hvdrun", 3)],
    ids=lambda value: str(value),
)
def test_digits_learns_and_its_checkpoint_needs_no_hvdtorch(
    launcher: Launcher, np: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--min-accuracy", "0.97"]
    result = run_script(np, EXAMPLES / "digits.py", launcher, SECONDS, args=arguments)
    assert result.returncode == 0, result.stdout
    reports = re.findall(r"test accuracy (\S+)% .* on (\d+) process\(es\)", result.stdout)
    assert len(reports) == 1, "rank 0 alone reports"
    accuracy, processes = float(reports[0][0]), int(reports[0][1])
    assert processes == np
    assert accuracy >= 97.0

    assert sorted(file.name for file in out.iterdir()) == ["curve.png", "digits.pt"]
    assert (out / "curve.png").read_bytes().startswith(PNG_MAGIC)
    saved = torch.load(out / "digits.pt", weights_only=True)
    assert f"{100 * saved['accuracy']:.2f}" == reports[0][0]

    predicted = run_blocked("hvdtorch", "predict_digits.py", str(out / "digits.pt"))
    assert predicted.returncode == 0, predicted.stderr
    correct = round(saved["accuracy"] * 360)
    assert f"accuracy {accuracy:.2f}%: {correct} of 360 test images" in predicted.stdout


@pytest.mark.timeout(SECONDS + 60)
def test_digits_below_the_asked_accuracy_exits_with_1(tmp_path: Path) -> None:
    arguments = ["--epochs", "1", "--fp16-allreduce", "--min-accuracy", "1.01"]
    arguments += ["--out", str(tmp_path / "out")]
    result = run_script(2, EXAMPLES / "digits.py", "python", SECONDS, args=arguments)
    assert result.returncodes == [1, 1], result.stdout
    assert all("is below 1.01" in output for output in result.outputs)
    assert (tmp_path / "out" / "digits.pt").exists()


def test_predict_without_a_checkpoint_says_what_to_run(tmp_path: Path) -> None:
    result = run_blocked("hvdtorch", "predict_digits.py", str(tmp_path / "none.pt"))
    assert result.returncode == 1
    assert "none.pt: run examples/digits.py first" in result.stderr


@pytest.mark.timeout(SECONDS + 60)
def test_synthetic_benchmark_reports_every_iteration_and_the_total() -> None:
    pytest.importorskip("torchvision", exc_type=ImportError)
    arguments = "--model resnet18 --batch-size 2 --image-size 32 --num-warmup-batches 1"
    arguments += " --num-batches-per-iter 2 --num-iters 3"
    script = EXAMPLES / "synthetic_benchmark.py"
    result = run_script(2, script, "hvdrun", SECONDS, args=arguments.split())
    assert result.returncode == 0, result.stdout
    assert len(re.findall(r"iteration [123]: [\d.]+ images/s on rank 0", result.stdout)) == 3
    assert re.search(r"images/s in all: +[\d.]+ \+- [\d.]+ \(2 process\(es\)\)", result.stdout)


def test_synthetic_benchmark_without_torchvision_says_so() -> None:
    result = run_blocked("torchvision", "synthetic_benchmark.py")
    assert result.returncode == 1
    assert "this benchmark needs torchvision's models" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("np", [1, 3])
def test_uneven_digits_learns(np: int) -> None:
    arguments = ["--epochs", "6", "--min-accuracy", "0.9"]
    result = run_script(np, EXAMPLES / "uneven_digits.py", "hvdrun", SECONDS, args=arguments)
    assert result.returncode == 0, result.stdout
    assert re.findall(r"epoch (\d): .* of 360 images right", result.stdout) == list("123456")
