"""What agreement costs: time, CPU, frames and bytes per negotiation, from 2 to thousands of ranks.

    python benchmarks/control_plane.py
    python benchmarks/control_plane.py --np 2,4,8 --ranks none --json out.json
    python benchmarks/control_plane.py --np none --ranks 64,4096 --tensors 1,160 --plot out.png

Real jobs of --np ranks run on this machine; --ranks are simulated around the real coordinator, in a
program that is compiled first (about a minute, with the system's C++ compiler). How to read the
numbers: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_tools.machine import head, head_lines
from bench_tools.options import add_outputs, check_plot, listed
from bench_tools.outputs import write
from control_bench import processes, report, simulated


def main(arguments: Sequence[str]) -> int:
    """Print both tables."""
    options = parse(arguments)
    document: dict[str, Any] = head("control_plane")
    for line in head_lines(document):
        print(line, flush=True)
    program = simulated.build(options.build_dir) if options.ranks else None
    real: list[processes.Row] = []
    if options.np:
        print("\nreal processes: per operation, blocking, one after the other")
        print(report.real_heading(), flush=True)
        for row in processes.rows(options.np, options.operations):
            real.append(row)
            print(report.real_line(row), flush=True)
    modelled: list[simulated.Row] = []
    if program:
        print("\nsimulated ranks: one step at the coordinator, without sockets")
        print(report.simulated_heading(), flush=True)
        for fresh in simulated.rows(program, options.ranks, options.tensors):
            modelled.append(fresh)
            print(report.simulated_line(fresh), flush=True)
    lines, numbers = report.reach(real, modelled)
    print("\n".join(["", *lines]))
    document |= {
        "processes": [asdict(row) for row in real],
        "simulated": [asdict(row) for row in modelled],
        "reach": numbers,
    }
    write(options, document, "control_bench.plot")
    return 0


def at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers."""

    def parse_one(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return parse_one


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--np",
        type=listed(at_least(2)),
        default="2,4,8,16,32,64",
        help="sizes of real jobs, comma list, or none (%(default)s)",
    )
    add(
        "--operations",
        type=int,
        default=500,
        help="per kind on 2 ranks; fewer on more, but 20 (%(default)s)",
    )
    add(
        "--ranks",
        type=listed(at_least(2)),
        default="2,8,64,256,1024,4096",
        help="sizes of simulated jobs, comma list, or none (%(default)s)",
    )
    add(
        "--tensors",
        type=listed(at_least(1)),
        default="1,10",
        help="said in one frame, in simulated jobs; comma list (%(default)s)",
    )
    add(
        "--build-dir",
        type=Path,
        default=simulated.BUILD,
        help="where the simulation is compiled (%(default)s)",
    )
    add_outputs(parser)
    options = parser.parse_args(arguments)
    if options.operations <= 0:
        parser.error("--operations must be above 0")
    if not options.np and not (options.ranks and options.tensors):
        parser.error("nothing to measure: name --np, or --ranks and --tensors")
    check_plot(parser, options)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
