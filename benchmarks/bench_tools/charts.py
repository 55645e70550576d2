"""PNG files of a run's numbers. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Of Okabe and Ito: told apart by readers who do not see all colours.
COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#000000", "#999999")


COLUMNS = 3  # most panels side by side


def figure(panels: int, title: str, document: dict[str, Any]) -> list[Any]:
    """`panels` axes, under a title and the machine of the run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(panels, 2 if panels == 4 else COLUMNS)
    rows = -(-panels // columns)
    drawn, axes = plt.subplots(rows, columns, figsize=(6.5 * columns, 5 * rows), squeeze=False)
    where = document["machine"]
    drawn.suptitle(
        f"{title}\n{where['cpu']}, {where['cores']} cores, torch {where['torch']}, "
        f"{document['date']}",
        fontsize=10,
    )
    for unused in axes.flat[panels:]:
        unused.remove()
    return list(axes.flat[:panels])


def save(panels: list[Any], path: Path) -> None:
    """Write the figure of these axes."""
    import matplotlib.pyplot as plt

    drawn = panels[0].figure
    drawn.tight_layout()
    drawn.savefig(path, dpi=120, format="png")
    plt.close(drawn)
