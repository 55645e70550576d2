"""Where and with what a run took place: what a reader must know to judge or repeat it."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """The hardware and software of this process."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def head(benchmark: str) -> dict[str, Any]:
    """The beginning of every JSON file."""
    return {
        "benchmark": benchmark,
        "command": " ".join([f"{benchmark}.py", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
    }


def head_lines(head: dict[str, Any]) -> list[str]:
    """The same for people, with a warning where times will mean little."""
    where = head["machine"]
    lines = [f"# {head['command']}", "# " + ", ".join(f"{k} {v}" for k, v in where.items())]
    if where["load"] > where["cores"] / 2:
        lines.append(
            "# this machine is busy with something else: times, and p99 above all, mean little"
        )
    return lines
