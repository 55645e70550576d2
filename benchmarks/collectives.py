"""Times of collectives: hvdtorch beside other libraries, in one run, results checked.

    python benchmarks/collectives.py --np 2
    python benchmarks/collectives.py --np 2 --sizes 4B,64KiB,4MiB --dtypes float32,bfloat16
    python benchmarks/collectives.py --np 2 --many 160x4KB,160x100KB --sizes none
    python benchmarks/collectives.py --np 4 --collectives allgather,broadcast,alltoall
    python benchmarks/collectives.py --goals --peers gloo,horovod-mpi --horovod-python PATH
    hvdrun -np 2 python benchmarks/collectives.py --json out.json
    torchrun --nproc-per-node 2 benchmarks/collectives.py

Under a launcher every process is a rank; otherwise --np of them are started with torchrun. How to
read the numbers: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from bench_tools import ranks
from bench_tools.machine import head, head_lines
from bench_tools.options import (
    add_horovod_python,
    add_outputs,
    check_needs,
    listed,
    one_of,
)
from bench_tools.outputs import write
from collective_bench import cases, goals, peers, report
from collective_bench.cases import Case
from collective_bench.measure import Bench
from collective_bench.peers import Hvdtorch, Peer

SIZES = "4B,1KiB,4KiB,32KiB,64KiB,256KiB,1MiB,4MiB,64MiB"  # of allreduce
FEW_SIZES = "4KiB,1MiB"  # of every other collective


def main(arguments: Sequence[str]) -> int:
    """0 if all results were right, 1 if not (goals missed are reported, and no failure)."""
    options = parse(arguments)
    if not ranks.under_launcher():
        ranks.start(Path(__file__), options.np, arguments)
    with ranks.connected() as say, ExitStack() as leaving:
        measured, skipped = present(options)
        for peer in measured:
            peer.setup()
            leaving.callback(peer.close)
        return run(options, measured, skipped, say)


def present(options: argparse.Namespace) -> tuple[list[Peer], list[str]]:
    """The peers that can be measured here, hvdtorch first, and a line for each that cannot."""
    measured: list[Peer] = [Hvdtorch()]
    skipped = []
    for name, make in peers.makers(options.peers, options.horovod_python).items():
        reason = peers.PEERS[name].missing() if name in peers.PEERS else None
        if reason is None:
            measured.append(make())
        else:
            skipped.append(f"{name}: not measured, {reason}")
    return measured, skipped


def run(
    options: argparse.Namespace, measured: Sequence[Peer], skipped: Sequence[str], say: Any
) -> int:
    """Measure every case; rank 0 prints each as it is done, then the goals."""
    size = dist.get_world_size()
    document: dict[str, Any] = head("collectives") | {
        "np": size,
        "threads": ranks.THREADS,
        "peers": {peer.name: peer.version() for peer in measured},
    }
    for line in head_lines(document):
        say(line)
    for name, version in document["peers"].items():
        say(f"# {name}: {version}")
    for line in skipped:
        say(f"# {line}")
    say(f"# {size} ranks, {ranks.THREADS} thread per rank; ratio: peer / hvdtorch")
    say(report.heading(), flush=True)
    bench = Bench(measured, options.iterations, options.seconds)
    rows: list[report.Row] = []
    for case in make_cases(options, size):
        fresh = report.rows_of(case, bench.measure(case))
        rows += fresh
        say("\n".join(row.line() for row in fresh), flush=True)
    wrong = sum(row.wrong for row in rows)
    say(f"\nresults: {'all right' if wrong == 0 else f'{wrong} WRONG elements'}")
    judged = goals.verdicts(rows, size)
    for verdict in judged:
        say(verdict.line())
    document["rows"] = [asdict(row) for row in rows]
    document["goals"] = [asdict(verdict) | {"met": verdict.met} for verdict in judged]
    if dist.get_rank() == 0:
        write(options, document, "collective_bench.plot")
    return 1 if wrong else 0


def make_cases(options: argparse.Namespace, size: int) -> list[Case]:
    """All cases the options ask for: one tensor first, then many at once. Only some collectives
    have an op, and only allreduce is measured on many tensors."""
    if options.goals:
        widest = Case("allreduce", 2 * goals.COUNT, "bfloat16", "sum", size)
        few = [Case("allreduce", nbytes, "float32", "sum", size) for nbytes in goals.SIZES]
        many = [Case("allreduce", n, "float32", "sum", size, tensors) for tensors, n in goals.MANY]
        return [*few, widest, *many]
    single = [
        Case(collective, nbytes, dtype, op, size)
        for collective in options.collectives
        for dtype, op, nbytes in itertools.product(
            options.dtypes,
            options.ops if collective in cases.REDUCING else ["-"],
            sizes_of(collective, options),
        )
    ]
    many = [
        Case("allreduce", nbytes, dtype, op, size, tensors)
        for dtype, op, (tensors, nbytes) in itertools.product(
            options.dtypes, options.ops, options.many
        )
        if "allreduce" in options.collectives
    ]
    return single + many


def sizes_of(collective: str, options: argparse.Namespace) -> list[int]:
    """Bytes of one tensor: --sizes, or what stands for it."""
    if options.sizes is not None:
        return options.sizes
    return listed(cases.parse_bytes)(SIZES if collective == "allreduce" else FEW_SIZES)


# ---- options ----


def parse_many(text: str) -> tuple[int, int]:
    """ "160x4KB" -> (160, 4000)."""
    match = re.fullmatch(r"(\d+)x(\w+)", text)
    if not match or int(match[1]) < 2:
        raise ValueError(f"{text!r} is not a number (2 or more) of tensors and a size: 160x4KB")
    return int(match[1]), cases.parse_bytes(match[2])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--np", type=int, default=2, help="ranks to start when not under a launcher (2)")
    add(
        "--collectives",
        type=listed(one_of(cases.COLLECTIVES)),
        default="allreduce,alltoall,reducescatter",
        help=f"comma list of {', '.join(cases.COLLECTIVES)} (%(default)s)",
    )
    add(
        "--sizes",
        type=listed(cases.parse_bytes),
        help="bytes of one tensor, comma list, or none; 1KB = 1000, 1KiB = 1024 "
        f"(allreduce: {SIZES}; the others: {FEW_SIZES})",
    )
    add(
        "--many",
        type=listed(parse_many),
        default="160x4KB,160x100KB",
        help="allreduces started together, then waited for, comma list, or none (%(default)s)",
    )
    add(
        "--dtypes",
        type=listed(one_of(list(cases.DTYPES))),
        default="float32",
        help=f"comma list of {', '.join(cases.DTYPES)} (float32)",
    )
    add(
        "--ops",
        type=listed(one_of(cases.OPS)),
        default="sum",
        help=f"of {' and '.join(cases.REDUCING)}: comma list of sum, average (sum)",
    )
    add(
        "--goals",
        action="store_true",
        help="measure what the goals speak of, and nothing else",
    )
    add(
        "--peers",
        type=listed(one_of(peers.NAMES)),
        default="hvdtorch-arena,gloo",
        help=f"measured beside hvdtorch: comma list of {', '.join(peers.NAMES)}, or none "
        "(%(default)s)",
    )
    add_horovod_python(parser)
    add("--iterations", type=int, default=500, help="most samples per row (500)")
    add("--seconds", type=float, default=3.0, help="about how long each case may take (3)")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    for name in ("np", "iterations", "seconds"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be above 0")
    for name in ("dtypes", "ops"):
        if not getattr(options, name):
            parser.error(f"--{name} is empty")
    check_needs(parser, options, options.peers)
    try:
        asked = make_cases(options, int(os.environ.get("WORLD_SIZE", options.np)))
    except ValueError as error:
        parser.error(str(error))
    if not asked:
        parser.error("nothing to measure: name --collectives, and --sizes (or --many of allreduce)")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
