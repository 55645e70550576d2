"""Is the native module `hvdtorch._C` there, and was it built for the torch that is running?

A module built against another torch fails with an undefined symbol, or worse, does not fail. So
the version is read from a stamp inside the file before the file is loaded.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


class HorovodVersionMismatchError(ImportError):
    """hvdtorch was built for another version of torch than the one that is running."""


REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
_STAMP = re.compile(rb"hvdtorch-built-for-torch=([^\x00]+)\x00")


def module_path() -> Path | None:
    """The file of `hvdtorch._C`, or None if it was never built."""
    spec = importlib.util.find_spec("hvdtorch._C")
    return Path(spec.origin) if spec is not None and spec.origin else None


def built_for() -> str | None:
    """Version of torch that the module was built for; None if there is no module."""
    path = module_path()
    if path is None:
        return None
    found = _STAMP.search(path.read_bytes())
    return found.group(1).decode() if found else "unknown"


def problem(torch_version: str) -> str | None:
    """One sentence that says why the module cannot be used with this torch; None if it can."""
    built = built_for()
    if built is None:
        return (
            "hvdtorch's native module is not built: run "
            f"'{REBUILD}' in its source tree (or 'python setup.py build_ext --inplace')"
        )
    if built != torch_version:
        return (
            f"hvdtorch was built for torch {built}, but torch {torch_version} is running: run "
            f"'{REBUILD}' in its source tree, or install torch {built}"
        )
    return None


def check(torch_version: str) -> None:
    """Raise ImportError with that sentence, if there is one; of a wrong version, its subclass."""
    text = problem(torch_version)
    if text is not None:
        raise (ImportError if built_for() is None else HorovodVersionMismatchError)(text)
