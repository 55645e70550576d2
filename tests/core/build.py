"""Builds the test program of the C++ core with the system's compiler alone: no torch, no Python.

    python tests/core/build.py BUILD_DIR [--sanitize none|address,undefined|thread]
                                         [--sources GLOB ...] [--main FILE]

prints the path of the program. `--sources` limits what is compiled (globs from the top of the
repository) and `--main` swaps the file that holds main(), for example for a fuzzer. An object file
is kept as long as the flags, its source and every header it includes have the same contents.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAIN = "tests/core/main.cc"
SOURCES = (
    "csrc/core/*.cc",
    "csrc/channel/*.cc",
    "csrc/shared/*.cc",
    "csrc/transport/*.cc",
    "csrc/kernels/*.cc",
    "tests/core/*_test.cc",
    "tests/core/*_reference.cc",
    "tests/core/allocations.cc",
    "tests/core/simulated_ranks.cc",
    "tests/core/fuzz_*.cc",
)
SANITIZERS = ("none", "address,undefined", "thread")
# -g1: lines in the sanitizers' reports, in half the time that -g takes to compile.
# -ffp-contract=off as in the package: one rounding per operation.
FLAGS = (
    *("-std=c++20", "-O1", "-g1", "-pthread", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Werror", "-I", "csrc"),
)
# Plain kernels are compiled as in the package, so that what is tested are the vectorised loops.
PLAIN_KERNEL_FLAGS = ("-O3",)
PARALLEL = 2


class BuildError(Exception):
    """The compiler or the linker failed; the text is its command and its output."""


def build(
    build_dir: Path,
    sanitize: str = "none",
    sources: Sequence[str] = SOURCES,
    main: str = MAIN,
) -> Path:
    """Compile what changed, link, and return the program's path.

    Parameters
    ----------
    build_dir : Path
        Where objects and programs are kept; made if missing. Builds in it take turns.
    sanitize : str
        One of `SANITIZERS`.
    sources : sequence of str
        Globs relative to the top of the repository.
    main : str
        The file with main(), relative to the top of the repository.

    Raises
    ------
    BuildError
        With the compiler's output, if a file does not compile or the program does not link.
    """
    if sanitize not in SANITIZERS:
        raise ValueError(f"sanitize={sanitize!r}: must be one of {', '.join(SANITIZERS)}")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = list(FLAGS)
    if sanitize != "none":
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    directory = build_dir.resolve() / sanitize.replace(",", "-")
    directory.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        is_plain_kernel = sanitize == "none" and source.parent.name == "kernels"
        extra = PLAIN_KERNEL_FLAGS if is_plain_kernel else ()
        return _compile([*compiler, *flags, *extra], source, directory)

    files = sorted({path for glob in sources for path in ROOT.glob(glob)} | {ROOT / main})
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
            objects = list(pool.map(compile_one, files))
        program = directory / Path(main).stem
        _run([*compiler, *flags, *map(str, objects), "-o", str(program)])
    return program


def _compile(command: list[str], source: Path, directory: Path) -> Path:
    name = "_".join(source.relative_to(ROOT).parts)
    target = directory / (name + ".o")
    dependencies, key = target.with_suffix(".d"), target.with_suffix(".key")
    if target.exists() and key.exists() and key.read_text() == _key(command, dependencies):
        return target
    key.unlink(missing_ok=True)
    _run([*command, "-MMD", "-MF", str(dependencies), "-c", str(source), "-o", str(target)])
    key.write_text(_key(command, dependencies))
    return target


def _key(command: list[str], dependencies: Path) -> str:
    """What an object is made from: the command and the contents of all files it read."""
    digest = hashlib.sha256("\0".join(command).encode())
    _, _, names = dependencies.read_text().partition(":")
    for name in names.replace("\\\n", " ").split():
        path = ROOT / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.exists() else b"gone"))
    return digest.hexdigest()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the test program of the C++ core.")
    parser.add_argument("build_dir", type=Path)
    parser.add_argument("--sanitize", choices=SANITIZERS, default="none")
    parser.add_argument("--sources", nargs="+", default=SOURCES, metavar="GLOB")
    parser.add_argument("--main", default=MAIN, metavar="FILE")
    args = parser.parse_args()
    try:
        print(build(args.build_dir, args.sanitize, args.sources, args.main))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
