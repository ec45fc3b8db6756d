"""Draw what ``keras-towers bench --json FILE`` measured.

Usage: ``python examples/plot_bench.py bench.json docs/images/bench.png``; needs
matplotlib, of the extra ``plots``. What ``bench --processes`` wrote gives
another picture, of what each way to exchange gradients costs, and what ``bench
--field`` wrote that of its ``--chart``.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import matplotlib
import typer

from keras_towers.bench.charts import (
    Panel,
    draw_field,
    draw_panel,
    label_rows,
    legend,
)
from keras_towers.bench.report import describe_machine

matplotlib.use("Agg")
from matplotlib import pyplot


class Picture(NamedTuple):
    """What a picture of one kind of measurement shows.

    Attributes:
        count: the key of the number of towers or processes, and their name.
        row: the key of a row's name.
        value: the key of the column that is drawn.
        scale: what is under the axis.
    """

    count: str
    row: str
    value: str
    scale: str


PICTURES = {
    "training": Picture(
        "towers", "strategy", "step_ms", "milliseconds a step, lower is better"
    ),
    "processes": Picture(
        "processes",
        "row",
        "cost_ms",
        "milliseconds a step above compute, lower is better",
    ),
}


def panels_of(
    results: list[dict[str, Any]], picture: Picture
) -> dict[tuple[str, int], Panel]:
    """What was measured, by model and number, without what was not.

    One replica has nothing to exchange, and is left out.
    """
    panels: dict[tuple[str, int], Panel] = {}
    for result in results:
        value = result[picture.value]
        if value and result[picture.count] > 1:
            key = result["model"], result[picture.count]
            panels.setdefault(key, {})[result[picture.row]] = value
    return panels


def sorted_rows(panels: dict[tuple[str, int], Panel]) -> list[str]:
    """All rows, the fastest first: by their ratio to a panel's fastest."""
    ratios: dict[str, list[float]] = {}
    for panel in panels.values():
        fastest = min(value["median"] for value in panel.values())
        for row, value in panel.items():
            ratios.setdefault(row, []).append(value["median"] / fastest)
    return sorted(ratios, key=lambda row: statistics.mean(ratios[row]))


def draw(document: dict[str, Any]) -> pyplot.Figure:
    """Draw a panel for each model and number, with one scale for a model."""
    if "field" in document:
        return draw_field(document)
    name = next(name for name in PICTURES if document.get(name))
    picture = PICTURES[name]
    panels = panels_of(document[name], picture)
    rows = sorted_rows(panels)
    models = list(dict.fromkeys(model for model, _ in panels))
    counts = sorted({count for _, count in panels})
    figure, grid = pyplot.subplots(
        len(models),
        len(counts),
        figsize=(
            3.2 + max(2.3 * len(counts), 4),
            1.2 + len(models) * (0.7 + 0.24 * len(rows)),
        ),
        layout="constrained",
        sharex="row",
        sharey=True,
        squeeze=False,
    )
    for across, model in zip(grid, models, strict=True):
        for axes, count in zip(across, counts, strict=True):
            axes.set_title(f"{model}, {count} {picture.count}", fontsize=10)
            draw_panel(axes, panels.get((model, count), {}), rows)
        # Room for the labels.
        across[0].set_xlim(0, across[0].get_xlim()[1] * 1.12)
        label_rows(across[0], rows)
    figure.supxlabel(f"{picture.scale}\n{caption(document)}", fontsize=8)
    legend(figure, rows, 4 if len(counts) > 1 else 3)
    return figure


def caption(document: dict[str, Any]) -> str:
    """Where it was measured, and how often."""
    where = describe_machine(document["machine"])
    repeats = f"median of {document['settings']['repeats']} repeats"
    values = [
        result[picture.value]
        for name, picture in PICTURES.items()
        for result in document.get(name, ())
    ]
    if any(value and value["low"] < value["high"] for value in values):
        repeats += "; lines reach from the smallest to the largest"
    return f"{where}\n{repeats}"


def main(
    report: Annotated[Path, typer.Argument(help="what the bench wrote")],
    picture: Annotated[Path, typer.Argument(help="PNG to write")],
) -> None:
    """Draw what a run of the bench measured."""
    draw(json.loads(report.read_text())).savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
