"""Simulated ranks around the real coordinator: builds and runs simulate.cc.

It is built as the tests of the core are (tests/core/build.py), but optimised as the package is.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "benchmarks"
MAIN = "benchmarks/control_bench/simulate.cc"
SOURCES = (
    *(f"csrc/core/{name}.cc" for name in ("coordinator", "log", "message", "negotiator")),
    *(f"csrc/core/{name}.cc" for name in ("operation", "planner", "stall", "types")),
    "csrc/kernels/*.cc",
)
MOST_STEPS, FEWEST_STEPS = 200, 10
RANK_STEPS = 40_000  # about how many rank x tensor x steps a row takes


@dataclass(frozen=True)
class Row:
    """A step in which every rank is ready for `tensors` tensors, as rank 0 sees it: sums over all
    ranks but itself. Times without sockets."""

    kind: str  # bucket: announced and launched; inline: travels inside the log
    known: bool  # whether the names have been there before
    ranks: int
    tensors: int
    steps: int
    frames_in: int
    bytes_in: int
    frames_out: int
    bytes_out: int
    read_us: float  # decode, negotiate
    decide_us: float  # plan, reduce what is inlined
    write_us: float  # encode, hand out

    @property
    def us(self) -> float:
        return self.read_us + self.decide_us + self.write_us


def build(directory: Path = BUILD) -> Path:
    """The program; compiled where anything it is made of has changed. Raises build.BuildError."""
    # By its path: `build` is also the name of a package.
    spec = importlib.util.spec_from_file_location("core_build", ROOT / "tests/core/build.py")
    assert spec and spec.loader
    core_build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core_build)
    # GCC 12 warns of its own library at -O3.
    flags = (flag for flag in core_build.FLAGS if flag != "-Werror")
    core_build.FLAGS = tuple("-O3" if flag == "-O1" else flag for flag in flags)
    return core_build.build(directory, sources=SOURCES, main=MAIN)


def rows(program: Path, ranks: list[int], tensors: list[int]) -> Iterator[Row]:
    """All kinds of steps, rank count by rank count."""
    for count in ranks:
        for many in tensors:
            steps = min(MOST_STEPS, max(FEWEST_STEPS, RANK_STEPS // (count * many)))
            command = [str(program), str(count), str(many), str(steps)]
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            yield from (Row(**json.loads(line)) for line in lines.splitlines())
