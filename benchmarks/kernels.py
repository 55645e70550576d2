"""Speed of the CPU reduction kernels beside memcpy, per dtype, op, instruction set and size.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --dtypes bfloat16 --ops Sum --sizes 16384,67108864 --sources 2,3,4
    python benchmarks/kernels.py --isas AVX2,plain --json out.json

Needs a C++ compiler and no torch: it builds the kernels as the package does, and a small program
(kernel_bench/main.cc) around them. GB/s counts the bytes read and written, n + 1 spans for a sum of
n; memcpy moves two. Times are processor time of the best round. A ratio of 1 or more says that the
arithmetic costs nothing beside moving the data.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from bench_tools.outputs import write_json

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "benchmarks/kernel_bench/main.cc"
SOURCES = ("csrc/kernels/*.cc", "csrc/core/types.cc")

_HEADING = f"{'dtype':15} {'op':8} {'isa':8} {'n':>2} {'bytes':>9} {'GB/s':>7} {'memcpy':>7} ratio"


@dataclass(frozen=True)
class Row:
    """One case: `sources` spans of `bytes` each, reduced into another one."""

    isa: str
    dtype: str
    op: str
    sources: int
    bytes: int
    gbps: float
    memcpy_gbps: float

    @property
    def ratio(self) -> float:
        """Above 1: more bytes moved in a second than by memcpy."""
        return self.gbps / self.memcpy_gbps

    def line(self) -> str:
        """A row of the table."""
        return (
            f"{self.dtype:15} {self.op:8} {self.isa:8} {self.sources:2} {self.bytes:9} "
            f"{self.gbps:7.2f} {self.memcpy_gbps:7.2f} {self.ratio:5.2f}"
        )


def main(arguments: Sequence[str]) -> int:
    """0, or the exit status of the compiler or the program."""
    options = parse(arguments)
    print(f"# {platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}")
    print(_HEADING, flush=True)
    rows = []
    try:
        for row in measure(options, build(options.build_dir)):
            rows.append(row)
            print(row.line(), flush=True)
    except subprocess.CalledProcessError as error:
        print(f"kernels.py: {error}", file=sys.stderr)
        return error.returncode or 1
    if options.json:
        head = {
            "benchmark": "kernels",
            "command": " ".join(["kernels.py", *arguments]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        numbers = [asdict(row) | {"ratio": row.ratio} for row in rows]
        write_json(options.json, head | {"rows": numbers})
    return 0


def build(directory: Path) -> str:
    """The path of the program, compiled where it is out of date."""
    command = [sys.executable, str(ROOT / "tests/core/build.py"), str(directory)]
    command += ["--sources", *SOURCES, "--main", PROGRAM]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def measure(options: argparse.Namespace, program: str) -> Iterator[Row]:
    """Every case, as the program finishes it."""
    lists = (options.sizes, options.sources, options.dtypes, options.ops, options.isas)
    command = [program, str(options.rounds), *lists]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            isa, dtype, op, sources, nbytes, gbps, memcpy = line.split()
            yield Row(isa, dtype, op, int(sources), int(nbytes), float(gbps), float(memcpy))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dtypes", default="float32,float64,bfloat16,float16,int32", help="(%(default)s)")
    add("--ops", default="Sum,Average", help="of Sum, Average, Min, Max, Product (%(default)s)")
    add("--isas", default="AVX-512,AVX2,plain", help="those the processor has of (%(default)s)")
    add("--sources", default="2,4", help="how many spans are reduced to one (%(default)s)")
    add("--sizes", default="16384,1048576,67108864", help="bytes of a span (%(default)s)")
    add("--rounds", type=int, default=7, help="of which the best counts (%(default)s)")
    add("--build-dir", type=Path, default=ROOT / "build" / "core-tests", help="for the program")
    add("--json", type=Path, help="also write all numbers to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
