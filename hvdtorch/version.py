"""The one place of the version: setup, `hvdtorch.__version__` and `hvdrun --version` read it."""

__version__ = "0.1.0"
