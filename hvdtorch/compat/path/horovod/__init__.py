"""The name `horovod` for hvdtorch. See hvdtorch/compat/__init__.py."""

from hvdtorch.compat import HOROVOD_VERSION as __version__

from .runner import run

__all__ = ["__version__", "run"]
