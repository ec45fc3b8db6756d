"""Draw what ``keras-towers bench --json FILE`` measured.

Usage: ``python examples/plot_bench.py bench.json examples/bench.png``; needs
``pip install 'keras-towers[plots]'``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import matplotlib
import typer

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {
    "plain": "#9aa0a6",
    "stock-default": "#d9822b",
    "stock-one-device": "#e8b27a",
    "stock-hierarchical": "#f3d3b0",
    "towers": "#1f6feb",
}
TITLES = {
    "plain": "plain Keras, one device",
    "stock-default": "MirroredStrategy",
    "stock-one-device": "MirroredStrategy, ReductionToOneDevice",
    "stock-hierarchical": "MirroredStrategy, HierarchicalCopyAllReduce",
    "towers": "TowerStrategy",
}


def step_ms(rows: list[dict], model: str, towers: int, strategy: str) -> float:
    """Milliseconds a step of one row, or not a number where there is none."""
    for row in rows:
        wanted = (model, towers, strategy)
        if (row["model"], row["towers"], row["strategy"]) == wanted:
            return row["step_ms"]["median"] if row["step_ms"] else float("nan")
    return float("nan")


def main(
    report: Annotated[Path, typer.Argument(help="what the bench wrote")],
    picture: Annotated[Path, typer.Argument(help="PNG to write")],
) -> None:
    """Draw milliseconds a step, one panel for each model."""
    rows = json.loads(report.read_text())["training"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    numbers = sorted({row["towers"] for row in rows} - {1})
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(4.2 * len(models), 3.4), layout="constrained"
    )
    width = 0.8 / len(COLOURS)
    for panel, model in zip(figure.axes, models, strict=True):
        for place, (strategy, colour) in enumerate(COLOURS.items()):
            panel.bar(
                [k + place * width for k in range(len(numbers))],
                [step_ms(rows, model, n, strategy) for n in numbers],
                width,
                color=colour,
                label=TITLES[strategy],
            )
        panel.set_title(model)
        panel.set_xticks([k + 0.4 - width / 2 for k in range(len(numbers))])
        panel.set_xticklabels([f"{n} towers" for n in numbers])
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("milliseconds a step (lower is better)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False
    )
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
