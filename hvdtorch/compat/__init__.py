"""Scripts written for Horovod, unchanged: a package named `horovod` whose every name is hvdtorch's.

The package lies in a folder of its own, `PATH`, and is never installed: it is there for those who
put the folder on Python's path.

    PYTHONPATH=$(python -m hvdtorch.compat) torchrun --nproc-per-node 4 train.py
    hvdrun --as-horovod -np 4 python train.py

The environment is inherited, so subprocesses and the workers of a DataLoader have it too. A Horovod
that is installed is hidden from processes started like this, and from no others.

    path/horovod   the package: re-exports only
    util           what `horovod.common.util` has
    autograd       the classes through which third-party code calls differentiable collectives
    adasum         the second class of wrapped optimizers
"""

from __future__ import annotations

from pathlib import Path

from hvdtorch.version import __version__

PATH = str(Path(__file__).resolve().parent / "path")

# `horovod.__version__`: the release whose API this is. Scripts compare it with the release that
# brought what they use, and split it at its dots, so hvdtorch's own number would mislead them.
HOROVOD_VERSION = "0.28.1"

_NOT_YET = {
    "elastic": "elastic training",
    "start_timeline": "the timeline",
    "stop_timeline": "the timeline",
}
_NEVER = {
    "_handle_map": "a handle keeps its tensors itself, there is no map of all handles",
    "_HorovodArgs": "horovod.run() takes what the launcher may be told as its own arguments",
}


def not_yet(module: str, what: str) -> str:
    """The text of the ImportError of a whole module that hvdtorch has nothing for yet."""
    return f"{module}: {what} is not available in hvdtorch {__version__} yet"


def missing(module: str, name: str) -> str:
    """The text of the AttributeError for a name that the `module` of Horovod has, or any other."""
    text = f"module {module!r} has no attribute {name!r}"
    if name in _NOT_YET:
        return f"{text}: {_NOT_YET[name]} is not available in hvdtorch {__version__} yet"
    return f"{text}: {_NEVER[name]}" if name in _NEVER else text
