"""What this build of hvdtorch can do, and what it runs on: `hvdrun --check-build`, `*_built()`.

It works, and says why, when the native module was not built or cannot be imported.
"""

from __future__ import annotations

import importlib
import platform
from types import ModuleType
from typing import Any

from hvdtorch.native import problem
from hvdtorch.version import __version__


def _import(name: str) -> tuple[ModuleType | None, str]:
    """A module, or None and why it cannot be imported."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # whatever the import of torch or of a mismatched library raises
        return None, f"{type(error).__name__}: {error}"


def _native() -> tuple[ModuleType | None, str]:
    """The native module, or None and why it cannot be used."""
    torch, why = _import("torch")
    if torch is None:
        return None, why
    why_not = problem(torch.__version__)
    return _import("hvdtorch._C") if why_not is None else (None, why_not)


def mpi_built() -> bool:
    """Whether MPI is built in: never, hvdtorch works without."""
    return False


def gloo_built() -> bool:
    """Whether Gloo can be used: the native module is there and torch has Gloo."""
    core, _ = _native()
    distributed, _ = _import("torch.distributed")
    return core is not None and distributed is not None and distributed.is_gloo_available()


def nccl_built() -> int:
    """The version code of the NCCL that can be used, as 23007 for 2.30.7; 0 if there is none."""
    core, _ = _native()
    # Building with CUDA does not bring NCCL collectives: a module that has them says so.
    if not getattr(core, "BUILD_WITH_NCCL", False):
        return 0
    numbers = _nccl_version()
    return numbers[0] * 10000 + numbers[1] * 100 + numbers[2] if numbers else 0


def ddl_built() -> bool:
    """Whether IBM DDL is built in: never."""
    return False


def ccl_built() -> bool:
    """Whether Intel oneCCL is built in: never."""
    return False


def cuda_built() -> bool:
    """Whether the native module was built with CUDA."""
    core, _ = _native()
    return core is not None and bool(core.BUILD_WITH_CUDA)


def rocm_built() -> bool:
    """Whether the native module was built with ROCm: never."""
    return False


def _nccl_version() -> tuple[int, int, int] | None:
    """The version of the NCCL that torch brings; None if it brings none."""
    torch, _ = _import("torch")
    if torch is None or torch.version.cuda is None:
        return None
    try:
        major, minor, patch = torch.cuda.nccl.version()[:3]
    except Exception:  # a torch built with CUDA and without NCCL
        return None
    return major, minor, patch


def check_build() -> dict[str, Any]:
    """What `hvdrun --check-build --json` prints.

    Returns:
        "version"; "frameworks", "controllers" and "operations": name -> whether it can be used;
        "python", "torch", "cuda", "nccl": versions, None for what is not there (of CUDA and NCCL:
        those of torch); "native": "importable", "error" and what the module was built for.
    """
    torch, torch_error = _import("torch")
    core, core_error = _native()
    nccl = _nccl_version()
    return {
        "version": __version__,
        "frameworks": {"TensorFlow": False, "PyTorch": core is not None, "MXNet": False},
        "controllers": {"MPI": mpi_built(), "Gloo": gloo_built()},
        "operations": {
            "NCCL": nccl_built() > 0,
            "DDL": ddl_built(),
            "CCL": ccl_built(),
            "MPI": mpi_built(),
            "Gloo": gloo_built(),
        },
        "python": platform.python_version(),
        "torch": None if torch is None else torch.__version__,
        "torch_error": torch_error or None,
        "cuda": None if torch is None else torch.version.cuda,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "native": {
            "importable": core is not None,
            "error": core_error or None,
            "torch": getattr(core, "BUILD_TORCH_VERSION", None),
            "cuda": cuda_built(),
        },
    }


def build_text(build: dict[str, Any]) -> str:
    """The result of `check_build()` for people."""
    lines = [f"hvdtorch v{build['version']}:"]
    for title, group in (
        ("Frameworks", "frameworks"),
        ("Controllers", "controllers"),
        ("Tensor Operations", "operations"),
    ):
        lines += ["", f"Available {title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in build[group].items()]
    core = build["native"]
    built = f"built for PyTorch {core['torch']}, {'with' if core['cuda'] else 'without'} CUDA"
    lines += [
        "",
        "Versions:",
        f"    Python         {build['python']}",
        f"    PyTorch        {build['torch'] or 'not importable: ' + build['torch_error']}",
        f"    CUDA           {build['cuda'] or 'none in this PyTorch'}",
        f"    NCCL           {build['nccl'] or 'none in this PyTorch'}",
        f"    Native module  {built if core['importable'] else 'no: ' + core['error']}",
    ]
    return "\n".join(lines)
