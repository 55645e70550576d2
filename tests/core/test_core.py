"""Runs the C++ core's own tests: plain, under ASan + UBSan, and under TSan.

One program per variant holds all cases; one pytest item runs the cases of one `*_test.cc` file.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
SUBJECTS = sorted(path.name.removesuffix("_test.cc") for path in HERE.glob("*_test.cc"))
BUILD_DIR = HERE.parents[1] / "build" / "core-tests"


def _load_build() -> ModuleType:
    """tests/core/build.py, whatever sys.path holds (`build` is also the name of a package)."""
    spec = importlib.util.spec_from_file_location("hvdtorch_core_build", HERE / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = _load_build()


@pytest.fixture(scope="module", params=BUILD.SANITIZERS)
def program(request: pytest.FixtureRequest) -> Path:
    """The built test program of one variant."""
    path: Path = BUILD.build(BUILD_DIR, request.param)
    return path


@pytest.mark.timeout(900)  # the first item of a variant also compiles it
@pytest.mark.parametrize("subject", SUBJECTS)
def test_core(program: Path, subject: str) -> None:
    done = subprocess.run(
        [str(program), f"{subject}: "],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, (
        f"{program} '{subject}: ' ended with {done.returncode}:\n{done.stdout}"
    )
