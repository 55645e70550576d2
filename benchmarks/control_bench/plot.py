"""The picture of a run: time and CPU of real jobs, time and bytes at a simulated coordinator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_tools.charts import COLOURS, figure, save

Rows = list[dict[str, Any]]


def draw(document: dict[str, Any], path: Path) -> None:
    """A PNG of the JSON document."""
    real, modelled = document["processes"], document["simulated"]
    count = 2 * bool(real) + 2 * bool(modelled)
    panels = figure(count, "control plane: one coordinator, all ranks in a star", document)
    rest = list(panels)
    if real:
        _lines(
            rest.pop(0),
            "real processes: time of one operation",
            "microseconds: median",
            {kind: [r for r in real if r["kind"] == kind] for kind in _kinds(real)},
            lambda row: (row["np"], row["median_us"]),
        )
        _lines(
            rest.pop(0),
            "real processes: CPU of rank 0 per operation",
            "microseconds",
            {kind: [r for r in real if r["kind"] == kind] for kind in _kinds(real)},
            lambda row: (row["np"], row["cpu_rank0_us"]),
        )
    if modelled:
        named: dict[str, Rows] = {}
        for row in modelled:
            names = "known" if row["known"] else "new"
            name = f"{row['kind']}, {names} names, {row['tensors']} at once"
            named.setdefault(name, []).append(row)
        _lines(
            rest.pop(0),
            "simulated ranks: coordinator, per tensor",
            "microseconds, without sockets",
            named,
            lambda row: (
                row["ranks"],
                (row["read_us"] + row["decide_us"] + row["write_us"]) / row["tensors"],
            ),
        )
        _lines(
            rest.pop(0),
            "simulated ranks: bytes in and out, per tensor",
            "bytes",
            named,
            lambda row: (row["ranks"], (row["bytes_in"] + row["bytes_out"]) / row["tensors"]),
        )
    save(panels, path)


def _kinds(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in rows))


def _lines(
    panel: Any,
    title: str,
    unit: str,
    named: dict[str, Rows],
    point: Callable[[dict[str, Any]], tuple[float, float]],
) -> None:
    for index, (name, rows) in enumerate(named.items()):
        xs, ys = zip(*map(point, rows), strict=True)
        panel.plot(xs, ys, marker="o", label=name, color=COLOURS[index % len(COLOURS)])
    ticks = sorted({point(row)[0] for rows in named.values() for row in rows})
    panel.set(title=title, xlabel="ranks", ylabel=unit, yscale="log")
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
