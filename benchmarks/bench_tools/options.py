"""Parsers of comma lists for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def listed(parse_one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Comma list of what `parse_one` takes; "none" is the empty list."""

    def parse_all(text: str) -> list[Any]:
        try:
            return [] if text == "none" else [parse_one(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_all


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """A parser of one name."""

    def parse_one(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse_one


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """--json and --plot."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there as well")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw them there as PNG (needs matplotlib)"
    )


def add_horovod_python(parser: argparse.ArgumentParser) -> None:
    """--horovod-python."""
    parser.add_argument(
        "--horovod-python",
        type=Path,
        metavar="PATH",
        help="the interpreter that has Horovod, for the peers named horovod-...",
    )


def check_needs(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str]
) -> None:
    """Ends the program where a peer needs an interpreter, or a plot matplotlib, and has none."""
    if any(name.startswith("horovod") for name in names):
        if options.horovod_python is None:
            parser.error("the peers named horovod-... need --horovod-python PATH")
        if not options.horovod_python.exists():
            parser.error(f"--horovod-python {options.horovod_python}: there is no such file")
    check_plot(parser, options)


def check_plot(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where a plot is asked for and cannot be drawn."""
    if options.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
