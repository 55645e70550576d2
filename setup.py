"""Builds `hvdtorch._C`, the native core, against the PyTorch that is installed.

Metadata lives in pyproject.toml; this file only knows how to compile. It finds out what is here
(torch, a C++20 compiler, Python's headers, CUDA), says in one sentence what is missing and what to
run, prints a summary, and hands two source lists to torch's own build command: ALWAYS, and
WITH_CUDA where CUDA is there.

Settings, all from the environment:

    CXX                 the C++ compiler (default: c++)
    MAX_JOBS            files compiled at once (default: by cores and free memory)
    HVDTORCH_WITH_CUDA  1: CUDA or an error; 0: never; unset: if it is found
    HVDTORCH_WERROR     1: warnings are errors
    HVDTORCH_DEBUG      1: -O1 with debug information

Objects are kept in build/ per torch version, so building again compiles only what changed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)
ALWAYS_FOLDERS = ("core", "channel", "shared", "transport", "kernels", "bind")
MEMORY_PER_JOB = 1.5 * 2**30  # a file that includes torch's headers takes this much

# The ninja of this Python before another on the machine, also when its environment is inactive.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])

try:
    import torch
    from torch.utils import cpp_extension

    TORCH_FAILURE = None
except Exception as failure:  # a broken torch raises OSError and others; its text is passed on
    torch = None
    TORCH_FAILURE = failure


def fail(sentence: str) -> None:
    """End the build with one sentence that says what is missing and what to run."""
    raise SystemExit(f"hvdtorch: {sentence}")


# ---- what is here ----


def check_torch() -> None:
    """torch imports and is new enough."""
    if isinstance(TORCH_FAILURE, ModuleNotFoundError):
        fail(
            f"building needs PyTorch, and {sys.executable} cannot import it ({TORCH_FAILURE}); run "
            "'pip install torch', then 'pip install --no-build-isolation .' (else pip builds in an "
            "environment of its own, which has no torch)."
        )
    if TORCH_FAILURE is not None:
        fail(
            f"the installed PyTorch does not import ({TORCH_FAILURE}); reinstall it and check with "
            "'python -c \"import torch\"'."
        )
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        fail(
            f"torch {torch.__version__} is too old, {oldest} or newer is needed; run "
            f"'pip install --upgrade \"torch>={oldest}\"'."
        )


def check_compiler() -> str:
    """The compiler and its version; fails unless it compiles C++20 and Python's headers exist."""
    compiler = shlex.split(cpp_extension.get_cxx_compiler())
    wanted = "GCC 11 or newer, or Clang 14 or newer"
    if shutil.which(compiler[0]) is None:
        fail(
            f"no C++ compiler: '{compiler[0]}' is not found; install {wanted} (Debian, Ubuntu: "
            "'apt install g++') or name one with CXX=/path/to/g++."
        )
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        fail(
            f"Python's headers are missing (no {headers}/Python.h); install them (Debian, Ubuntu: "
            "'apt install python3-dev')."
        )
    probe = subprocess.run(
        [*compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
        input="#include <bit>\n#include <concepts>\n#include <span>\nint main() { return 0; }\n",
        capture_output=True,
        text=True,
    )
    if probe.returncode != 0:
        said = (probe.stderr.strip() or f"exit status {probe.returncode}").splitlines()[0]
        fail(
            f"the C++ compiler '{shlex.join(compiler)}' cannot compile C++20 ({said}); install "
            f"{wanted}, or name one with CXX=/path/to/g++."
        )
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    return f"{shlex.join(compiler)}: {(version.splitlines() or ['unknown version'])[0]}"


def cuda_absent_reason(sources: list[str]) -> str | None:
    """Why CUDA sources cannot be built here, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU-only build"
    home = cpp_extension.CUDA_HOME
    if home is None:
        return "no CUDA toolkit found (nvcc is not in PATH and CUDA_HOME is not set)"
    if shutil.which("nvcc", path=os.path.join(home, "bin")) is None:
        return f"no nvcc in {home}/bin"
    if not sources:
        return "this version of hvdtorch has no CUDA sources"
    return None


def decide_cuda(sources: list[str]) -> tuple[bool, str]:
    """Whether the WITH_CUDA list is built, and why."""
    asked = os.environ.get("HVDTORCH_WITH_CUDA", "").strip().lower()
    if asked == "0":
        return False, "HVDTORCH_WITH_CUDA=0"
    if asked not in ("", "auto", "1"):
        fail(f"HVDTORCH_WITH_CUDA={asked} is not understood; use 0, 1, or leave it unset.")
    reason = cuda_absent_reason(sources)
    if reason is None:
        return True, f"CUDA {torch.version.cuda}, toolkit in {cpp_extension.CUDA_HOME}"
    if asked == "1":
        fail(
            f"HVDTORCH_WITH_CUDA=1, but {reason}; install what is missing, or unset "
            "HVDTORCH_WITH_CUDA to build for the CPU."
        )
    return False, reason


# ---- what is built ----


def is_cuda_source(path: Path) -> bool:
    """CUDA-only files say so in their names: *.cu, *_cuda.cc, nccl*.cc."""
    return path.suffix == ".cu" or path.name.endswith("_cuda.cc") or path.name.startswith("nccl")


def source_lists() -> tuple[list[str], list[str]]:
    """(ALWAYS, WITH_CUDA): paths relative to the root, sorted."""
    files = sorted(
        path
        for folder in ALWAYS_FOLDERS
        for path in (ROOT / "csrc" / folder).rglob("*")
        if path.suffix in (".cc", ".cu")
    )
    always = [str(f.relative_to(ROOT)) for f in files if not is_cuda_source(f)]
    with_cuda = [str(f.relative_to(ROOT)) for f in files if is_cuda_source(f)]
    return always, with_cuda


@dataclass
class Plan:
    """Everything the compiler is told, decided before it is started."""

    compiler: str
    sources: list[str]
    with_cuda: bool
    cuda_reason: str
    flags: list[str]

    @classmethod
    def make(cls) -> Plan:
        check_torch()
        compiler = check_compiler()
        always, cuda_only = source_lists()
        with_cuda, reason = decide_cuda(cuda_only)
        flags = ["-std=c++20", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
        # One rounding per operation on every processor: a fused multiply-add would round once.
        flags.append("-ffp-contract=off")
        flags += ["-O1", "-g"] if os.environ.get("HVDTORCH_DEBUG") == "1" else ["-O3", "-g0"]
        if os.environ.get("HVDTORCH_WERROR") == "1":
            flags.append("-Werror")
        return cls(compiler, always + (cuda_only if with_cuda else []), with_cuda, reason, flags)

    def fill(self, extension: Extension) -> None:
        """Give `extension` its sources, flags and libraries."""
        make = cpp_extension.CUDAExtension if self.with_cuda else cpp_extension.CppExtension
        native = make(extension.name, self.sources)
        # torch's headers as system headers: their warnings are not ours.
        system = [f"-isystem{path}" for path in native.include_dirs]
        cxx = self.flags + system
        extension.sources = self.sources
        extension.include_dirs = [str(ROOT / "csrc")]
        extension.library_dirs = native.library_dirs
        extension.libraries = native.libraries
        extension.define_macros = [("HVDTORCH_TORCH_VERSION", f'"{torch.__version__}"')]
        if self.with_cuda:
            extension.define_macros.append(("HVDTORCH_WITH_CUDA", None))
        extension.extra_compile_args = {"cxx": cxx, "nvcc": ["-O3", "-std=c++20", *system]}
        extension.extra_link_args = ["-pthread"]
        extension.language = "c++"

    def summary(self, jobs: str, folder: str) -> str:
        """What is built, with what, and why; printed before compiling."""
        rows = {
            "torch": f"{torch.__version__} ({Path(torch.__file__).parent})",
            "python": f"{sys.version.split()[0]} ({sys.executable})",
            "compiler": self.compiler,
            "CUDA": f"{'yes' if self.with_cuda else 'no'} ({self.cuda_reason})",
            "sources": f"{len(self.sources)} files in csrc/, {jobs} at a time",
            "flags": shlex.join(self.flags),
            "objects": folder,
        }
        lines = [f"  {name:<9} {value}" for name, value in rows.items()]
        return "\n".join(["hvdtorch build summary", *lines, ""])


def default_jobs() -> int:
    """As many compilations at once as cores and free memory allow."""
    cores = len(os.sched_getaffinity(0))
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        memory = int(found[1]) * 1024 if found else None
    except OSError:
        memory = None
    fitting = cores if memory is None else int(memory / MEMORY_PER_JOB)
    return max(1, min(cores, fitting))


class BuildNative(build_ext if torch is None else cpp_extension.BuildExtension):
    """torch's build command, told by a Plan what to build."""

    def finalize_options(self) -> None:
        chosen = self.build_temp
        super().finalize_options()
        if chosen is None and torch is not None:
            # An object belongs to one torch; a folder each, and pip finds the same one.
            tag = f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
            self.build_temp = str(ROOT / "build" / tag)

    def run(self) -> None:
        plan = Plan.make()
        jobs = os.environ.setdefault("MAX_JOBS", str(default_jobs()))
        print(plan.summary(jobs, self.build_temp), flush=True)
        for extension in self.extensions:
            plan.fill(extension)
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:  # builds of one tree take turns
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()


setup(
    # Here and not in pyproject.toml: old and new setuptools disagree on how it is written there.
    license="Apache-2.0",
    ext_modules=[Extension("hvdtorch._C", source_lists()[0], language="c++")],
    cmdclass={"build_ext": BuildNative},
)
