"""Times of training steps: hvdtorch beside other ways to reduce gradients, in one run, checked.

    python benchmarks/training.py --np 2
    python benchmarks/training.py --models deep --peers ddp-gloo,horovod-mpi --horovod-python PATH
    python benchmarks/training.py --models wide --json out.json --plot out.png
    python benchmarks/training.py --parts idle

The baseline is as many independent processes at the same time. Under a launcher every process is a
rank; otherwise --np of them are started with torchrun. How to read the numbers: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_tools import ranks, rounds
from bench_tools.machine import head, head_lines
from bench_tools.options import (
    add_horovod_python,
    add_outputs,
    check_needs,
    listed,
    one_of,
)
from bench_tools.outputs import write
from training_bench import idle, models, reference, report, trainers
from training_bench.trainers import Trainer

PARTS = ("steps", "hooks", "idle")
FEWEST_ROUNDS = 10
WARM_UP_ROUNDS = 3
PREFIX = 3  # steps whose losses are compared
IDLE_TURNS, IDLE_SAMPLES = 6, 25


def main(arguments: Sequence[str]) -> int:
    """0 if all results were right, 1 if not (goals missed are reported, and no failure)."""
    options = parse(arguments)
    if not ranks.under_launcher():
        ranks.start(Path(__file__), options.np, arguments)
    with ranks.connected() as say:
        return run(options, say)


def run(options: argparse.Namespace, say: Any) -> int:
    """The parts that were asked for; rank 0 prints and writes."""
    size = dist.get_world_size()
    document: dict[str, Any] = head("training") | {"np": size, "threads": ranks.THREADS}
    for line in head_lines(document):
        say(line)
    say(f"# {size} ranks, {ranks.THREADS} thread per rank; ratio: to independent processes")
    judged: list[report.Verdict] = []
    rows: list[report.Row] = []
    if "steps" in options.parts:
        rows = steps(options, document, say)
        document["rows"] = [asdict(row) for row in rows]
        judged += report.step_verdicts(rows, size)
    if "hooks" in options.parts:
        alone = hooks_alone(options)
        say("\nhooks and bookkeeping of 1 rank alone, without anybody to exchange with:")
        say("\n".join([report.heading(), *(row.line() for row in alone)]), flush=True)
        document["alone"] = [asdict(row) for row in alone]
        judged += report.alone_verdicts(alone)
    if "idle" in options.parts:
        found = idle.document(options.idle_seconds, IDLE_TURNS, IDLE_SAMPLES)
        say_idle(found, size, say)
        document["idle"] = found
        judged += idle_verdicts(found)
    wrong = sum(row.wrong for row in rows)
    if rows:
        say(f"\nresults: {'all right' if wrong == 0 else f'{wrong} rows WRONG'}")
    for verdict in judged:
        say(verdict.line())
    document["goals"] = [asdict(verdict) | {"met": verdict.met} for verdict in judged]
    if dist.get_rank() == 0:
        write(options, document, "training_bench.plot" if document.get("rows") else None)
    return 1 if wrong else 0


# ---- steps ----


def steps(options: argparse.Namespace, document: dict[str, Any], say: Any) -> list[report.Row]:
    """The table, model by model."""
    with ExitStack() as leaving:
        columns = trainers.make(options.peers, options.horovod_python)
        for trainer in columns:
            trainer.setup()
            leaving.callback(trainer.close)
        document["trainers"] = {trainer.name: trainer.version() for trainer in columns}
        for name, version in document["trainers"].items():
            say(f"# {name}: {version}")
        say(report.heading(), flush=True)
        rows: list[report.Row] = []
        for model in options.models:
            fresh = measure(options, model, columns, say)
            rows += fresh
            say("\n".join(row.line() for row in fresh), flush=True)
        return rows


def measure(
    options: argparse.Namespace, model: str, columns: Sequence[Trainer], say: Any
) -> list[report.Row]:
    """All trainers on one model, one sample of --burst steps each per round."""
    rank, size = dist.get_rank(), dist.get_world_size()
    present = []
    for trainer in columns:
        if reason := trainer.missing(model):
            say(f"# {model}, {trainer.name}: not measured, {reason}")
        else:
            present.append(trainer)
    if not present or present[0].name != report.BASELINE:
        return []
    expected = reference.losses(model, rank, size, PREFIX)
    off_by = {}
    for trainer in present:
        trainer.prepare(model, rank)
        off_by[trainer.name] = deviation(trainer.losses(PREFIX), expected)
    found = rounds.measure(
        [partial(trainer.sample, dist.barrier, options.burst) for trainer in present],
        most=options.samples,
        fewest=FEWEST_ROUNDS,
        warm_up=WARM_UP_ROUNDS,
        seconds=options.seconds,
    )
    same = {trainer.name: all_equal(trainer.digest()) for trainer in present}
    for trainer in present:
        trainer.drop()
    bare = models.make(model)
    claims = {t.name: (off_by[t.name], same[t.name]) for t in present if t.reduces}
    return report.rows_of(
        model,
        tensors=sum(1 for _ in bare.parameters()),
        parameters=sum(p.numel() for p in bare.parameters()),
        found=[
            (trainer.name, series, *claims.get(trainer.name, (None, None)))
            for trainer, series in zip(present, found, strict=True)
        ],
    )


def deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative one, over all ranks."""
    own = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    worst = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def all_equal(value: str) -> bool:
    """Whether all ranks passed the same."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return len(set(values)) == 1


# ---- hooks ----


def hooks_alone(options: argparse.Namespace) -> list[report.Row]:
    """Rows of a run of this program on one rank, whose only peer is the baseline."""
    rows: list[report.Row] = []
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "alone.json"
            command = [sys.executable, __file__, "--np", "1", "--parts", "steps"]
            command += ["--models", report.HOOK_MODEL, "--peers", "none", "--json", str(file)]
            command += ["--seconds", str(options.seconds), "--samples", str(options.samples)]
            command += ["--burst", str(options.burst)]
            environment = ranks.environment_without_launcher()
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            rows = [report.Row(**row) for row in json.loads(file.read_text())["rows"]]
    return ranks.from_rank_0(rows)


# ---- idle ----


def say_idle(found: dict[str, Any], size: int, say: Any) -> None:
    """For people."""
    say(f"\nidle for {found['seconds']:g} s, {size} ranks: context switches of the threads that")
    say("hvd.init() started, all ranks together:")
    for name, count in found["switches"].items():
        say(f"  {name:<16} {count}")
    timed = found["loop"]
    say(
        f"{idle.PRODUCTS} products of {idle.PRODUCT} x {idle.PRODUCT} matrices on every rank, "
        f"{timed['samples']} samples: {timed['without_ms']:.3f} ms without hvdtorch, "
        f"{timed['with_ms']:.3f} ms beside it, ratio {timed['slowdown']:.4f}",
        flush=True,
    )


def idle_verdicts(found: dict[str, Any]) -> list[report.Verdict]:
    """The runtime's threads are known by their names."""
    ours = sum(count for name, count in found["switches"].items() if name.startswith("hvd-"))
    slowdown = found["loop"]["slowdown"]
    beside = "a loop of matrix products beside idle hvdtorch, over the same without"
    return [
        report.Verdict("wake-ups of hvdtorch's threads while idle", 0, ours),
        report.Verdict(beside, report.IDLE_SLOWDOWN_GOAL, slowdown),
    ]


# ---- options ----


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--np", type=int, default=2, help="ranks to start when not under a launcher (2)")
    add(
        "--models",
        type=listed(one_of(list(models.RECIPES))),
        default="deep,wide,resnet18,resnet50",
        help="comma list (%(default)s)",
    )
    add(
        "--parts",
        type=listed(one_of(PARTS)),
        default=",".join(PARTS),
        help="comma list: the table of training steps, hooks of one rank alone, idle (%(default)s)",
    )
    add(
        "--peers",
        type=listed(one_of(trainers.NAMES)),
        default="ddp-gloo",
        help=f"measured beside hvdtorch: comma list of {', '.join(trainers.NAMES)}, or none "
        "(%(default)s)",
    )
    add_horovod_python(parser)
    add("--samples", type=int, default=200, help="most samples per row (200)")
    add("--burst", type=int, default=4, help="steps per sample, in a row (4)")
    add("--seconds", type=float, default=30.0, help="about how long each model may take (30)")
    add("--idle-seconds", type=float, default=10.0, help="how long idle threads are watched (10)")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    for name in ("np", "samples", "burst", "seconds", "idle_seconds"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if not options.parts:
        parser.error("--parts is empty")
    if "steps" in options.parts and not options.models:
        parser.error("--models is empty")
    check_needs(parser, options, options.peers)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
