"""The files that --json and --plot name."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any


def write_json(path: Path, document: dict[str, Any]) -> None:
    """All numbers of a run."""
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {path}")


def write(options: argparse.Namespace, document: dict[str, Any], charts: str | None) -> None:
    """The files that the options name. `charts`: the module that draws them, None: nothing to draw.

    It is imported only here, because it needs matplotlib.
    """
    if options.json:
        write_json(options.json, document)
    if options.plot and charts:
        importlib.import_module(charts).draw(document, options.plot)
        print(f"drawn: {options.plot}")
