"""Metadata, package contents, and what setup.py says when something is missing. Compiles nothing.

Each test works on a copy of the tree, so that no egg-info or build folder appears beside the code.
"""

import os
import shutil
import stat
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

import pytest
from support.processes import REPOSITORY

import hvdtorch

COPIED = (".ci", "hvdtorch", "csrc", "docs", "examples", "tests", "benchmarks")
NO_TORCH = "import sys; sys.modules['torch'] = None; "


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the repository, without what was built in it."""
    root = tmp_path / "tree"
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for name in COPIED:
        shutil.copytree(REPOSITORY / name, root / name, ignore=built)
    for file in REPOSITORY.iterdir():
        if file.is_file():
            shutil.copy(file, root)
    return root


def run(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("CXX", "CUDA_HOME", "PYTHONPATH") and not key.startswith("HVDTORCH_")
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def setup_py(root: Path, command: str, **environment: str) -> str:
    """Run setup.py, which must fail with our sentence; returns the sentence."""
    done = run(root, "setup.py", *command.split(), **environment)
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    sentences = [line for line in text.splitlines() if line.startswith("hvdtorch: ")]
    assert len(sentences) == 1, text
    assert "Traceback" not in text
    assert not list(root.rglob("*.o")), "the compiler was started"
    return sentences[0]


def without_torch(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py in a Python that has no torch."""
    code = f"import runpy; sys.argv[0] = 'setup.py'; {NO_TORCH} runpy.run_path('setup.py')"
    return run(root, "-c", "import sys; " + code, *arguments)


def test_metadata_is_built_without_torch(tree: Path, tmp_path: Path) -> None:
    code = (
        NO_TORCH
        + "from setuptools import build_meta as b; import sys; "
        + ("b.prepare_metadata_for_build_wheel(sys.argv[1])")
    )
    done = run(tree, "-c", code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    [info] = tmp_path.glob("*.dist-info")

    metadata = message_from_string((info / "METADATA").read_text())
    assert metadata["Name"] == "hvdtorch"
    assert metadata["Version"] == hvdtorch.__version__ == "0.1.0"
    assert metadata["License"] == "Apache-2.0"
    requirements = metadata.get_all("Requires-Dist", [])
    assert sorted(r for r in requirements if "extra ==" not in r) == ["cloudpickle", "torch>=2.11"]

    entry_points = ConfigParser()
    entry_points.read(info / "entry_points.txt")
    assert dict(entry_points["console_scripts"]) == {
        "hvdrun": "hvdtorch.launch.cli:main",
        "horovodrun": "hvdtorch.launch.cli:main",
    }


def test_the_launcher_both_commands_name_exists() -> None:
    from hvdtorch.launch import cli

    assert callable(cli.main)


def test_sdist_has_all_that_building_needs_and_nothing_built(tree: Path) -> None:
    (tree / "hvdtorch" / "_C.cpython-311-x86_64-linux-gnu.so").touch()
    done = without_torch(tree, "-q", "sdist")
    assert done.returncode == 0, done.stderr
    [archive] = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        members = [member.name for member in tar.getmembers() if member.isfile()]
    names = {name.partition("/")[2] for name in members}
    sources = {
        str(path.relative_to(tree))
        for folder in ("csrc", "hvdtorch", "examples")
        for path in (tree / folder).rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc")
    }
    assert sources - names == set()
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert {"Makefile", ".ci/requirements.py"} <= names, "make test works in it"
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


def test_the_package_has_its_types_and_all_its_modules(tree: Path, tmp_path: Path) -> None:
    done = without_torch(tree, "-q", "build_py", "--build-lib", str(tmp_path / "lib"))
    assert done.returncode == 0, done.stderr
    wanted = {
        path.relative_to(tree)
        for path in (tree / "hvdtorch").rglob("*")
        if path.suffix in (".py", ".pyi", ".typed")
    }
    packaged = {path.relative_to(tmp_path / "lib") for path in (tmp_path / "lib").rglob("*.*")}
    assert Path("hvdtorch/py.typed") in wanted
    assert Path("hvdtorch/_C.pyi") in wanted
    assert packaged == wanted


def test_missing_torch_is_one_sentence_with_the_command_to_run(tree: Path) -> None:
    done = without_torch(tree, "build_ext", "--inplace")
    assert done.returncode == 1
    sentence = done.stderr.strip().splitlines()[-1]
    assert sentence.startswith(f"hvdtorch: building needs PyTorch, and {sys.executable} cannot")
    assert "'pip install torch'" in sentence
    assert "'pip install --no-build-isolation .'" in sentence
    assert "Traceback" not in done.stderr


def test_torch_that_is_too_old_is_named(tree: Path) -> None:
    fake = tree / "fake" / "torch"
    (fake / "utils").mkdir(parents=True)
    (fake / "__init__.py").write_text("__version__ = '2.10.1+cpu'\n")
    (fake / "utils" / "__init__.py").touch()
    (fake / "utils" / "cpp_extension.py").write_text(
        "from setuptools.command.build_ext import build_ext as BuildExtension\n"
    )
    sentence = setup_py(tree, "build_ext --inplace", PYTHONPATH=str(fake.parent))
    assert "torch 2.10.1+cpu is too old, 2.11 or newer is needed" in sentence
    assert "pip install --upgrade" in sentence


def test_missing_compiler_is_named_before_anything_is_compiled(tree: Path) -> None:
    sentence = setup_py(tree, "build_ext --inplace", CXX="/nonexistent/c++")
    assert "'/nonexistent/c++' is not found" in sentence
    assert "apt install g++" in sentence


def test_compiler_without_cxx20_is_named_with_what_it_said(tree: Path) -> None:
    compiler = tree / "old-c++"
    compiler.write_text("#!/bin/sh\necho 'unrecognized option -std=c++20' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    sentence = setup_py(tree, "build_ext --inplace", CXX=str(compiler))
    assert f"'{compiler}' cannot compile C++20 (unrecognized option -std=c++20)" in sentence


def test_cuda_that_was_asked_for_and_is_not_there_is_an_error(tree: Path) -> None:
    environment = {"HVDTORCH_WITH_CUDA": "1", "CUDA_HOME": "/nonexistent/cuda"}
    sentence = setup_py(tree, "build_ext --inplace", **environment)
    assert sentence.startswith("hvdtorch: HVDTORCH_WITH_CUDA=1, but ")
    assert "no nvcc in /nonexistent/cuda/bin" in sentence or "CPU-only build" in sentence


def test_a_cuda_setting_that_means_nothing_is_an_error(tree: Path) -> None:
    sentence = setup_py(tree, "build_ext --inplace", HVDTORCH_WITH_CUDA="maybe")
    assert "HVDTORCH_WITH_CUDA=maybe is not understood" in sentence
