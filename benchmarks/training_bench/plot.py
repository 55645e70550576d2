"""The picture of a run: a panel per model, a bar per trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench_tools.charts import COLOURS, figure, save

from training_bench.report import BASELINE


def draw(document: dict[str, Any], path: Path) -> None:
    """A PNG of the JSON document."""
    models: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        models.setdefault(row["model"], []).append(row)
    trainers = list(dict.fromkeys(row["trainer"] for row in document["rows"]))
    panels = figure(len(models), f"training step, {document['np']} ranks, one host", document)
    for panel, (model, rows) in zip(panels, models.items(), strict=True):
        names = [row["trainer"] for row in rows]
        medians = [row["median_ms"] for row in rows]
        bars = panel.bar(names, medians, color=[COLOURS[trainers.index(name)] for name in names])
        panel.bar_label(bars, [f"{row['median_ms']:.1f}\nx {row['ratio']:.2f}" for row in rows])
        baseline = next(row["median_ms"] for row in rows if row["trainer"] == BASELINE)
        panel.axhline(baseline, color="black", linestyle=":", linewidth=1)
        count = f"{rows[0]['tensors']} tensors, {rows[0]['parameters']:,} parameters"
        panel.set(title=f"{model}: {count}", ylabel="milliseconds: median of a step")
        panel.tick_params(axis="x", rotation=30)
        panel.margins(y=0.2)
    save(panels, path)
