"""hvdtorch: what `horovod.torch` gives, on today's PyTorch.

    import hvdtorch as hvd

The public names live in `hvdtorch.torch` and are loaded at first use, so that the launcher, which
needs none of them, starts without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdtorch.version import __version__

if TYPE_CHECKING:
    from hvdtorch.torch import *  # noqa: F403

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    import importlib.util

    # A submodule is for the import system to find, without the API.
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is None:
        api = importlib.import_module("hvdtorch.torch")
        if name in api.__all__:
            globals()[name] = value = getattr(api, name)
            return value
    from hvdtorch.compat import missing

    raise AttributeError(missing("hvdtorch", name))


def __dir__() -> list[str]:
    import importlib

    return sorted({*globals(), *importlib.import_module("hvdtorch.torch").__all__})
