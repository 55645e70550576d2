"""Training scripts that know only `horovod.torch` run under hvdtorch as they are.

The scripts in scripts/ do what well-known tutorials do. Here they are started in each of the ways
in which a user starts such a script, and what they report is checked: that they learn, that all
ranks end with the same weights, that a job which was stopped and resumed ends where one that was
not stopped does.
"""

import re
from pathlib import Path

import pytest
from support.processes import clean_environment
from support.scripts import Launcher, ScriptResult, run_script

from hvdtorch.compat import PATH

SCRIPTS = Path(__file__).parent / "scripts"
SECONDS = 200.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * SECONDS + 30)]


def run_as_horovod(np: int, launcher: Launcher, script: str, *args: str) -> ScriptResult:
    """Run one of the scripts to its good end."""
    if launcher == "hvdrun":
        result = run_script(np, SCRIPTS / script, launcher, SECONDS, {}, args, ["--as-horovod"])
    else:
        path = {"PYTHONPATH": f"{PATH}:{clean_environment()['PYTHONPATH']}"}
        result = run_script(np, SCRIPTS / script, launcher, SECONDS, path, args)
    assert result.returncode == 0, result.stdout
    return result


def final_weights(result: ScriptResult, np: int) -> str:
    """The digest of the weights that all ranks report."""
    reports = re.findall(r"rank (\d+) of (\d+): weights ([0-9a-f]{64})", result.stdout)
    assert sorted((int(r), int(s)) for r, s, _ in reports) == [(r, np) for r in range(np)]
    digests = {digest for _, _, digest in reports}
    assert len(digests) == 1, "the ranks' weights differ"
    return digests.pop()


def numbers(pattern: str, result: ScriptResult) -> list[float]:
    """What rank 0 printed at the place of `(...)`, in order."""
    return [float(text) for text in re.findall(pattern, result.stdout)]


def check_mnist(result: ScriptResult, np: int, accuracy: float = 40.0) -> None:
    losses = numbers(r"Average loss: ([\d.]+)", result)
    assert losses[-1] < losses[0]
    assert numbers(r"Accuracy: ([\d.]+)%", result)[-1] > accuracy
    final_weights(result, np)


def check_imagenet(result: ScriptResult, np: int, epochs: int) -> None:
    for kind in ("Train", "Validate"):
        losses = numbers(kind + r" Epoch #\d+: loss=([\d.]+)", result)
        assert len(losses) == epochs, "rank 0 alone reports, once per epoch"
        assert losses[-1] < losses[0] / 2
    final_weights(result, np)


# ---- MNIST ----


@pytest.mark.parametrize(("np", "launcher"), [(2, "torchrun"), (3, "hvdrun")])
def test_mnist_learns(np: int, launcher: Launcher) -> None:
    result = run_as_horovod(np, launcher, "mnist_style.py")
    assert len(numbers(r"Average loss: ([\d.]+)", result)) == 4, "rank 0 alone reports"
    check_mnist(result, np)


def test_mnist_with_spawned_data_workers_and_fp16() -> None:
    arguments = ["--num-workers", "1", "--epochs", "1", "--fp16-allreduce"]
    check_mnist(run_as_horovod(2, "hvdrun", "mnist_style.py", *arguments), 2, accuracy=15.0)


def test_mnist_with_a_predivide_factor_ends_where_it_does_without() -> None:
    # 2 divides exactly, so scaling before the sum and after it gives the same bits.
    arguments = ["--epochs", "1", "--gradient-predivide-factor"]
    weights = [
        final_weights(run_as_horovod(2, "python", "mnist_style.py", *arguments, factor), 2)
        for factor in ("1.0", "2.0")
    ]
    assert weights[0] == weights[1]


# ---- ImageNet ----


@pytest.mark.parametrize(("np", "launcher"), [(2, "hvdrun"), (3, "torchrun")])
def test_imagenet_resumed_ends_where_it_would_have_ended(
    np: int, launcher: Launcher, tmp_path: Path
) -> None:
    def train(folder: str, epochs: int) -> ScriptResult:
        (tmp_path / folder).mkdir(exist_ok=True)
        checkpoints = str(tmp_path / folder / "checkpoint-{epoch}")
        arguments = ["--batches-per-allreduce", "2", "--warmup-epochs", "2"]
        arguments += ["--checkpoint-format", checkpoints, "--epochs", str(epochs)]
        return run_as_horovod(np, launcher, "imagenet_style.py", *arguments)

    straight = train("straight", 4)
    check_imagenet(straight, np, 4)

    stopped = train("resumed", 2)
    assert "starting after epoch 0" in stopped.stdout
    assert len(list((tmp_path / "resumed").iterdir())) == 2
    resumed = train("resumed", 4)
    assert "starting after epoch 2" in resumed.stdout
    assert re.findall(r"Train Epoch #(\d)", resumed.stdout) == ["3", "4"]
    assert final_weights(resumed, np) == final_weights(straight, np)
    assert final_weights(resumed, np) != final_weights(stopped, np)


# ---- GAN ----


@pytest.mark.parametrize(("np", "launcher"), [(2, "python"), (3, "hvdrun")])
def test_gan_finds_the_points(np: int, launcher: Launcher) -> None:
    result = run_as_horovod(np, launcher, "gan_style.py")
    before, after = (numbers(rf"{when}=([\d.]+)", result) for when in ("before", "after"))
    assert len(before) == len(after) == 1
    assert after[0] < before[0] / 3
    final_weights(result, np)


# ---- further flags ----


def test_imagenet_with_groups_ends_where_it_does_without(tmp_path: Path) -> None:
    def train(folder: str, *flags: str) -> ScriptResult:
        (tmp_path / folder).mkdir()
        checkpoints = str(tmp_path / folder / "checkpoint-{epoch}")
        arguments = ["--checkpoint-format", checkpoints, *flags]
        return run_as_horovod(2, "python", "imagenet_style.py", *arguments)

    result = train("groups", "--num-groups", "2", "--gradient-predivide-factor", "2.0")
    check_imagenet(result, 2, 4)
    assert final_weights(result, 2) == final_weights(train("plain"), 2)


@pytest.mark.parametrize("np", [2, 3])
def test_mnist_with_adasum(np: int) -> None:
    check_mnist(run_as_horovod(np, "hvdrun", "mnist_style.py", "--use-adasum"), np, accuracy=30.0)


def test_imagenet_with_adasum_and_accumulation(tmp_path: Path) -> None:
    arguments = ["--use-adasum", "--batches-per-allreduce", "2"]
    arguments += ["--checkpoint-format", str(tmp_path / "checkpoint-{epoch}")]
    check_imagenet(run_as_horovod(2, "python", "imagenet_style.py", *arguments), 2, 4)
