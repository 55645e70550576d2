"""The picture of a run: time against size for one tensor, bars for many at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench_tools.charts import COLOURS, figure, save

from collective_bench.cases import show_bytes


def draw(document: dict[str, Any], path: Path) -> None:
    """A PNG of the JSON document: one panel per collective, dtype and op, and one for the rows of
    many tensors if there are any."""
    rows = document["rows"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["tensors"] == 1:
            words = [row["collective"], row["dtype"], row["op"]]
            groups.setdefault(" ".join(w for w in words if w != "-"), []).append(row)
    many = [row for row in rows if row["tensors"] > 1]
    panels = figure(len(groups) + bool(many), f"{document['np']} ranks, one host", document)
    for panel, (title, group) in zip(panels, groups.items(), strict=False):
        _lines(panel, title, group)
    if many:
        _bars(panels[len(groups)], many)
    save(panels, path)


def _lines(panel: Any, title: str, rows: list[dict[str, Any]]) -> None:
    for index, peer in enumerate(dict.fromkeys(row["peer"] for row in rows)):
        own = sorted((r["bytes"], r["median_us"], r["p99_us"]) for r in rows if r["peer"] == peer)
        sizes, medians, tails = zip(*own, strict=True)
        panel.plot(sizes, medians, marker="o", label=peer, color=COLOURS[index])
        panel.plot(sizes, tails, linestyle=":", linewidth=1, color=COLOURS[index])
    ticks = sorted({row["bytes"] for row in rows})
    panel.set(xscale="log", yscale="log", title=title, xlabel="bytes of the tensor")
    panel.set_ylabel("microseconds: median, dotted p99")
    panel.set_xticks(ticks, [show_bytes(n) for n in ticks], rotation=40, ha="right", fontsize=8)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def _bars(panel: Any, rows: list[dict[str, Any]]) -> None:
    def title(row: dict[str, Any]) -> str:
        return f"{row['tensors']} x {show_bytes(row['bytes'])}\n{row['dtype']} {row['op']}"

    titles = list(dict.fromkeys(map(title, rows)))
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    width = 0.8 / len(peers)
    for index, peer in enumerate(peers):
        own = [row for row in rows if row["peer"] == peer]
        places = [titles.index(title(row)) + (index - (len(peers) - 1) / 2) * width for row in own]
        heights = [row["median_us"] / 1000 for row in own]
        bars = panel.bar(places, heights, width, label=peer, color=COLOURS[index])
        panel.bar_label(bars, fmt="%.1f", fontsize=7)
    panel.set_xticks(range(len(titles)), titles, fontsize=8)
    panel.set(title="many allreduces at once", ylabel="milliseconds: median", yscale="log")
    panel.grid(alpha=0.3, axis="y")
    panel.legend(fontsize=8)
