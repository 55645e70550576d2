"""Times of collectives: hvdtorch beside other libraries, in one run, results checked.

    python benchmarks/collectives.py --np 2
    python benchmarks/collectives.py --np 2 --sizes 4B,64KiB,4MiB --dtypes float32,bfloat16
    python benchmarks/collectives.py --np 2 --many 160x4KB,160x100KB --sizes none
    python benchmarks/collectives.py --np 4 --collectives allgather,broadcast,alltoall
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
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from collective_bench import cases, report
from collective_bench.cases import Case
from collective_bench.measure import Bench
from collective_bench.peers import PEERS, Hvdtorch, Peer

SIZES = "4B,1KiB,4KiB,32KiB,64KiB,256KiB,1MiB,4MiB,64MiB"  # of allreduce
FEW_SIZES = "4KiB,1MiB"  # of every other collective
THREADS = 1  # per rank, of torch's own operators: ranks share the cores


def main(arguments: Sequence[str]) -> int:
    """0 if all results were right, 1 if not (goals missed are reported, and no failure)."""
    options = parse(arguments)
    if "RANK" not in os.environ:
        start_ranks(options.np, arguments)
    torch.set_num_threads(THREADS)
    dist.init_process_group("gloo")  # for barriers and counts only
    peers: list[Peer] = [Hvdtorch(), *(PEERS[name]() for name in options.peers)]
    for peer in peers:
        peer.setup()
    try:
        return run(options, peers)
    finally:
        for peer in peers:
            peer.close()
        dist.destroy_process_group()


def run(options: argparse.Namespace, peers: Sequence[Peer]) -> int:
    """Measure every case; rank 0 prints each as it is done, then the goals."""
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    head = describe(peers)
    say(f"# {head['command']}")
    say("# " + ", ".join(f"{key} {value}" for key, value in head["machine"].items()))
    if head["machine"]["load"] > head["machine"]["cores"] / 2:
        say("# this machine is busy with something else: times, and p99 above all, mean little")
    for name, version in head["peers"].items():
        say(f"# {name}: {version}")
    say(f"# {head['np']} ranks, {head['threads']} thread per rank; ratio: peer / hvdtorch")
    say(report.heading(), flush=True)
    bench = Bench(peers, options.iterations, options.seconds)
    rows: list[report.Row] = []
    for case in make_cases(options, dist.get_world_size()):
        fresh = report.rows_of(case, bench.measure(case))
        rows += fresh
        say("\n".join(row.line() for row in fresh), flush=True)
    wrong = sum(row.wrong for row in rows)
    say(f"\nresults: {'all right' if wrong == 0 else f'{wrong} WRONG elements'}")
    for verdict in report.verdicts(rows):
        say(verdict.line())
    if options.json and dist.get_rank() == 0:
        report.write_json(options.json, head, rows)
        say(f"written: {options.json}")
    return 1 if wrong else 0


def make_cases(options: argparse.Namespace, size: int) -> list[Case]:
    """All cases the options ask for: one tensor first, then many at once. Only some collectives
    have an op, and only allreduce is measured on many tensors."""
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


def describe(peers: Sequence[Peer]) -> dict[str, Any]:
    """What a reader must know to judge or repeat the run."""
    return {
        "benchmark": "collectives",
        "command": " ".join(["collectives.py", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": report.machine(),
        "np": dist.get_world_size(),
        "threads": THREADS,
        "peers": {peer.name: peer.version() for peer in peers},
    }


def start_ranks(count: int, arguments: Sequence[str]) -> NoReturn:
    """Become torchrun with `count` ranks of this script (its output carries no prefixes)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # After "--" or torchrun takes our --np for a short form of its own option.
    command += ["--nproc-per-node", str(count), "--", str(Path(__file__).resolve()), *arguments]
    os.execve(command[0], command, os.environ | {"OMP_NUM_THREADS": str(THREADS)})


# ---- options ----


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
        "--peers",
        type=listed(one_of(list(PEERS))),
        default="gloo",
        help=f"measured beside hvdtorch: comma list of {', '.join(PEERS)}, or none (gloo)",
    )
    add("--iterations", type=int, default=500, help="most samples per row (500)")
    add("--seconds", type=float, default=3.0, help="about how long each case may take (3)")
    add("--json", type=Path, metavar="FILE", help="write all numbers there as well")
    options = parser.parse_args(arguments)
    for name in ("np", "iterations", "seconds"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be above 0")
    for name in ("dtypes", "ops"):
        if not getattr(options, name):
            parser.error(f"--{name} is empty")
    try:
        asked = make_cases(options, int(os.environ.get("WORLD_SIZE", options.np)))
    except ValueError as error:
        parser.error(str(error))
    if not asked:
        parser.error("nothing to measure: name --collectives, and --sizes (or --many of allreduce)")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
