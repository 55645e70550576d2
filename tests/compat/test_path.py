"""The package `horovod` beside the path: who sees it, who does not, and what it leaves out."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import clean_environment
from support.scripts import run_script

from hvdtorch import compat, native
from hvdtorch.launch.cli import make_parser
from hvdtorch.launch.environ import JobSpec, rank_environment
from hvdtorch.version import __version__

SAY_WHICH = "import horovod; print(getattr(horovod, 'REAL', False), horovod.__file__)"


def python(source: str, *path: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines in a new process; `path` comes first in its PYTHONPATH."""
    environment = clean_environment()
    environment["PYTHONPATH"] = os.pathsep.join([*path, environment["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False
    )


def as_horovod(source: str) -> str:
    """What a few lines print with the folder on the path, after a good end."""
    done = python(source, compat.PATH)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def installed_horovod(tmp_path: Path) -> Iterator[str]:
    """A folder on the path like site-packages, with another `horovod` in it."""
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("REAL = True\n")
    yield str(tmp_path)


# ---- who sees it ----


def test_the_command_prints_the_folder_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdtorch.compat"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == compat.PATH + "\n"
    assert sorted(entry.name for entry in Path(compat.PATH).iterdir()) == ["horovod"]


def test_printing_the_folder_needs_no_torch() -> None:
    assert python("import sys, hvdtorch.compat; print('torch' in sys.modules)").stdout == "False\n"


def test_without_the_folder_there_is_no_horovod_of_hvdtorch(installed_horovod: str) -> None:
    done = python("import sys, hvdtorch.torch; print('horovod' in sys.modules)")
    assert done.stdout == "False\n", done.stderr
    # Whatever the name means on this machine, it is not this package.
    found = python("import importlib.util as u; print(u.find_spec('horovod'))").stdout
    assert compat.PATH not in found
    assert python(SAY_WHICH, installed_horovod).stdout.startswith("True ")


def test_the_folder_hides_an_installed_horovod(installed_horovod: str) -> None:
    shown = python(SAY_WHICH, compat.PATH, installed_horovod).stdout
    assert shown == f"False {compat.PATH}/horovod/__init__.py\n"


@pytest.mark.parametrize(("flags", "real"), [([], "True"), (["--as-horovod"], "False")])
def test_hvdrun_hides_an_installed_horovod_only_when_asked(
    installed_horovod: str, flags: list[str], real: str
) -> None:
    path = os.pathsep.join([installed_horovod, clean_environment()["PYTHONPATH"]])
    result = run_script(2, SAY_WHICH, "hvdrun", env={"PYTHONPATH": path}, flags=flags)
    assert result.returncode == 0, result.stdout
    for rank in range(2):
        assert f"[{rank}]<stdout>:{real} " in result.stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, compat.PATH),
        ({"PYTHONPATH": ""}, compat.PATH),
        ({"PYTHONPATH": "/a:/b"}, f"{compat.PATH}:/a:/b"),
    ],
)
def test_hvdrun_puts_the_folder_first(before: dict[str, str], after: str) -> None:
    job = JobSpec(size=1, hostname="localhost", port=1, key="", settings={}, as_horovod=True)
    assert rank_environment(before, job, 0)["PYTHONPATH"] == after
    job = JobSpec(size=1, hostname="localhost", port=1, key="", settings={})
    assert rank_environment(before, job, 0).get("PYTHONPATH") == before.get("PYTHONPATH")


def test_hvdruns_help_tells_of_it() -> None:
    assert "--as-horovod" in make_parser().format_help()


def test_processes_started_by_a_script_see_it_too() -> None:
    shown = as_horovod(
        """
import multiprocessing, subprocess, sys
import horovod.torch as hvd
code = "import horovod.torch as hvd; hvd.init(); print(hvd.size(), hvd.__name__)"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
for method in ("spawn", "forkserver"):
    with multiprocessing.get_context(method).Pool(1) as pool:
        print(pool.apply(eval, ["__import__('horovod.torch').torch.is_initialized()"]))
"""
    )
    assert shown.split() == ["1", "horovod.torch", "False", "False"]


# ---- what it is ----


def test_the_version_is_one_that_scripts_can_compare() -> None:
    shown = as_horovod(
        "import horovod, horovod.torch as hvd; print(horovod.__version__, hvd.__version__)"
    )
    version, of_torch = shown.split()
    assert version == of_torch == compat.HOROVOD_VERSION
    assert tuple(int(part) for part in version.split(".")) == (0, 28, 1)


def test_submodules_are_attributes_once_horovod_torch_is_imported() -> None:
    modules = ["torch.mpi_ops", "torch.compression", "torch.functions", "torch.optimizer"]
    modules += ["torch.sync_batch_norm", "common.exceptions", "common.process_sets", "common.util"]
    lines = ["import horovod.torch", *(f"print(horovod.{module}.__name__)" for module in modules)]
    assert as_horovod("\n".join(lines)).split() == [f"horovod.{module}" for module in modules]


def test_a_star_import_takes_the_api_and_no_module() -> None:
    shown = as_horovod(
        "before = set(globals())\n"
        "from horovod.torch import *\n"
        "import hvdtorch.torch\n"
        "print(set(globals()) - before - {'before', 'hvdtorch'} == set(hvdtorch.torch.__all__))"
    )
    assert shown == "True\n"


def test_a_wrapped_optimizers_class_has_horovods_name() -> None:
    source = (
        "import pickle, torch, {package}.torch as hvd\n"
        "hvd.init()\n"
        "plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)\n"
        "optimizer = hvd.DistributedOptimizer(plain)\n"
        "copied = pickle.loads(pickle.dumps(optimizer))\n"
        "print(type(optimizer).__module__, type(optimizer).__name__, type(copied).__module__)"
    )
    shown = as_horovod(source.format(package="horovod"))
    assert shown == "horovod.torch.optimizer SGD torch.optim.sgd\n"
    shown = as_horovod(source.format(package="hvdtorch"))
    assert shown == "hvdtorch.optimizer SGD torch.optim.sgd\n"


# ---- what it leaves out ----

NOT_YET = f"is not available in hvdtorch {__version__} yet"
ELASTIC = f"elastic training {NOT_YET}"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import horovod.torch.elastic", f"ImportError: horovod.torch.elastic: {ELASTIC}"),
        ("from horovod.torch import elastic", f"ImportError: horovod.torch.elastic: {ELASTIC}"),
        (
            "from horovod.torch.elastic.state import TorchState",
            f"ImportError: horovod.torch.elastic: {ELASTIC}",
        ),
        ("import horovod.common.elastic", f"ImportError: horovod.common.elastic: {ELASTIC}"),
        (
            "import horovod.torch as hvd; hvd.elastic.run",
            f"AttributeError: module 'horovod.torch' has no attribute 'elastic': {ELASTIC}",
        ),
        (
            "import horovod.torch as hvd; hvd.start_timeline('t.json')",
            "AttributeError: module 'horovod.torch' has no attribute 'start_timeline': the "
            f"timeline {NOT_YET}",
        ),
        (
            "import horovod.torch.mpi_ops as ops; ops._handle_map",
            "AttributeError: module 'horovod.torch.mpi_ops' has no attribute '_handle_map': a "
            "handle keeps its tensors itself, there is no map of all handles",
        ),
        (
            "import horovod.runner as runner; runner._HorovodArgs",
            "AttributeError: module 'horovod.runner' has no attribute '_HorovodArgs': "
            "horovod.run() takes what the launcher may be told as its own arguments",
        ),
        (
            "import horovod.torch as hvd; hvd.no_such_name",
            "AttributeError: module 'horovod.torch' has no attribute 'no_such_name'",
        ),
        # Libraries try this place of old first, and then `horovod` itself.
        (
            "from horovod.run.runner import run",
            "ModuleNotFoundError: No module named 'horovod.run'",
        ),
        (
            "import horovod.tensorflow",
            "ModuleNotFoundError: No module named 'horovod.tensorflow'",
        ),
    ],
    ids=lambda text: text if "import" in text else "",
)
def test_what_is_not_there_says_so(source: str, error: str) -> None:
    done = python(source, compat.PATH)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == error


def test_hasattr_sees_what_is_not_there() -> None:
    shown = as_horovod("import horovod.torch as hvd; print(hasattr(hvd, 'elastic'))")
    assert shown == "False\n"


# ---- exceptions ----


def test_an_interrupt_says_whether_to_synchronize() -> None:
    from hvdtorch.exceptions import HostsUpdatedInterrupt

    interrupt = HostsUpdatedInterrupt(True)
    assert isinstance(interrupt, RuntimeError)
    assert interrupt.skip_sync is True


def test_another_torch_than_the_one_built_for_is_a_version_mismatch() -> None:
    from hvdtorch.exceptions import HorovodVersionMismatchError

    assert issubclass(HorovodVersionMismatchError, ImportError)
    with pytest.raises(HorovodVersionMismatchError, match="but torch 99 is running"):
        native.check("99")
