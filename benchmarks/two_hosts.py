"""Allreduce between two hosts that share a slow link: how much of the link hvdtorch fills.

    python benchmarks/two_hosts.py
    python benchmarks/two_hosts.py --rate 10gbit --ranks-per-host 4 --json out.json

The hosts are network namespaces of this machine, joined by a virtual cable that `tc` shapes to
--rate in each direction (root only; see bench_tools/namespaces.py). The ranks run collectives.py,
which measures and checks; this file adds what the cable could have done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_tools import namespaces, ranks
from bench_tools.machine import head_lines
from bench_tools.options import listed, one_of
from bench_tools.outputs import write_json
from collective_bench import cases

SCRIPT = Path(__file__).with_name("collectives.py")
LARGE = 16 << 20  # bytes: from here on bandwidth counts, below it latency
_UNITS = {"mbit": 1e6, "gbit": 1e9}


def main(arguments: Sequence[str]) -> int:
    """0 if all results were right, 1 if not (a goal missed is reported, and no failure)."""
    options = parse(arguments)
    if reason := namespaces.missing():
        sys.exit(f"two hosts cannot be simulated here: {reason}")
    with namespaces.two_hosts(options.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        status = run_ranks(hosts, options, file)
        if status != 0:
            return status
        document = json.loads(file.read_text())
    document |= {
        "benchmark": "two_hosts",
        "command": " ".join(["two_hosts.py", *arguments]),
        "rate": options.rate,
        "hosts": len(hosts),
        "rows": [judged(row, len(hosts), options.rate) for row in document["rows"]],
        "goals": [],
    }
    show(document)
    if options.json:
        write_json(options.json, document)
    return 0


def run_ranks(hosts: Sequence[namespaces.Host], options: argparse.Namespace, file: Path) -> int:
    """collectives.py on every rank; the first exit status that is not 0."""
    command = [sys.executable, str(SCRIPT), "--collectives", "allreduce", "--many", "none"]
    command += ["--sizes", options.sizes, "--peers", ",".join(options.peers) or "none"]
    command += ["--dtypes", options.dtypes, "--seconds", str(options.seconds), "--json", str(file)]
    processes = []
    try:
        for rank in range(options.ranks_per_host * len(hosts)):
            environment = ranks.environment_without_launcher() | {"OMP_NUM_THREADS": "1"}
            environment |= namespaces.rank_environment(hosts, options.ranks_per_host, rank)
            host = hosts[rank // options.ranks_per_host]
            # Its table and goals are those of one host: show() prints ours.
            processes.append(
                subprocess.Popen(host.command(*command), env=environment, stdout=subprocess.DEVNULL)
            )
        return next((code for code in [p.wait() for p in processes] if code != 0), 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def judged(row: dict[str, Any], hosts: int, rate: str) -> dict[str, Any]:
    """`row` with what the link between the hosts had to carry at least.

    For each byte of an allreduce a host must send and receive 2 (h - 1) / h, h being the number of
    hosts: busbw as nccl-tests define it, with hosts in the place of ranks.
    """
    link = bits_per_second(rate) / 8
    carried = 2 * (hosts - 1) / hosts * row["bytes"] / (row["median_us"] / 1e6)
    return row | {"link_gb_s": carried / 1e9, "share_of_line_rate": carried / link}


def show(document: dict[str, Any]) -> None:
    """The table, then the two goals."""
    rows = document["rows"]
    print("\n".join(head_lines(document)))
    print(f"# {document['hosts']} hosts, {document['np']} ranks, {document['rate']} each way")
    print(
        f"{'bytes':>10}  {'dtype':>8}  {'peer':>12}  {'median us':>10}  {'link':>6}  {'ratio':>6}"
    )
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(
            f"{row['bytes']:>10}  {row['dtype']:>8}  {row['peer']:>12}  {row['median_us']:>10.1f}  "
            f"{row['share_of_line_rate']:>6.1%}  {ratio:>6}"
        )
    for row in rows:
        if row["peer"] == "hvdtorch" and row["bytes"] >= LARGE:
            share = row["share_of_line_rate"]
            say_goal(document, share >= 0.9, f"{name(row)}: {share:.1%} of line rate (goal 90%)")
        if row["peer"] == "gloo" and row["bytes"] < LARGE:
            text = f"{name(row)}: Gloo takes {row['ratio']:.2f} x as long (goal 1)"
            say_goal(document, row["ratio"] >= 1.0, text)


def name(row: dict[str, Any]) -> str:
    return f"{cases.show_bytes(row['bytes'])} {row['dtype']}"


def say_goal(document: dict[str, Any], met: bool, text: str) -> None:
    document["goals"].append({"goal": text, "met": met})
    print(f"{'met   ' if met else 'MISSED'}  {text}")


def bits_per_second(rate: str) -> float:
    """ "1gbit" -> 1e9. ValueError for what tc would take and we do not."""
    for unit, factor in _UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"{rate!r} is not a rate: write 1gbit or 100mbit")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rate", default="1gbit", help="of the link, each way: 1gbit, 100mbit (%(default)s)")
    add("--ranks-per-host", type=int, default=2, metavar="N", help="(%(default)s)")
    add("--sizes", default="4KiB,64MiB", help="as of collectives.py (%(default)s)")
    add("--dtypes", default="float32", help="as of collectives.py (%(default)s)")
    add(
        "--peers",
        type=listed(one_of(["gloo"])),
        default="gloo",
        help="measured beside hvdtorch: gloo or none (%(default)s)",
    )
    add("--seconds", type=float, default=10.0, help="about how long each size takes (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all numbers there as well")
    options = parser.parse_args(arguments)
    try:
        bits_per_second(options.rate)
    except ValueError as error:
        parser.error(str(error))
    if options.ranks_per_host < 1:
        parser.error("--ranks-per-host must be 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
