"""Draw what ``keras-towers bench --json FILE`` measured.

Usage: ``python examples/plot_bench.py bench.json examples/bench.png``; needs
``pip install 'keras-towers[plots]'``. What ``bench --processes`` wrote gives
another picture, of what each way to exchange gradients costs.
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
    "parameter-server": "#123f8c",
    "async": "#7fb0f5",
}
TITLES = {
    "plain": "plain Keras, one device",
    "stock-default": "MirroredStrategy",
    "stock-one-device": "MirroredStrategy, ReductionToOneDevice",
    "stock-hierarchical": "MirroredStrategy, HierarchicalCopyAllReduce",
    "towers": "TowerStrategy",
    "parameter-server": "ParameterServerTowerStrategy",
    "async": "AsyncTowerStrategy, whole batches",
}
OURS, HOROVODS, OTHERS = "#1f6feb", "#d9822b", "#9aa0a6"
PROCESS_TITLES = {
    "horovod-raw": "Horovod, grouped_allreduce by hand",
    "horovod-drop-in": "keras_towers.horovod",
    "strategy": "HorovodStrategy",
    "strategy-none": "HorovodStrategy, exact by Horovod",
    "stock-loop": "MultiWorkerMirroredStrategy, ring, own loop",
    "torch-ddp": "PyTorch DDP, gloo (above PyTorch alone)",
}


def step_ms(rows: list[dict], model: str, towers: int, strategy: str) -> float:
    """Milliseconds a step of one row, or not a number where there is none."""
    for row in rows:
        wanted = (model, towers, strategy)
        if (row["model"], row["towers"], row["strategy"]) == wanted:
            return row["step_ms"]["median"] if row["step_ms"] else float("nan")
    return float("nan")


def draw_towers(rows: list[dict]) -> pyplot.Figure:
    """Draw milliseconds a step, one panel for each model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    numbers = sorted({row["towers"] for row in rows} - {1})
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(4.2 * len(models), 3.4), layout="constrained"
    )
    measured = {row["strategy"] for row in rows}
    colours = {n: colour for n, colour in COLOURS.items() if n in measured}
    width = 0.84 / len(colours)
    for panel, model in zip(figure.axes, models, strict=True):
        for place, (strategy, colour) in enumerate(colours.items()):
            panel.bar(
                [k + place * width for k in range(len(numbers))],
                [step_ms(rows, model, n, strategy) for n in numbers],
                width,
                color=colour,
                label=TITLES[strategy],
            )
        panel.set_title(model)
        panel.set_xticks([k + 0.42 - width / 2 for k in range(len(numbers))])
        panel.set_xticklabels([f"{n} towers" for n in numbers])
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("milliseconds a step (lower is better)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False
    )
    return figure


def process_title(row: str) -> str:
    """What a row of several processes is called."""
    if row in PROCESS_TITLES:
        return PROCESS_TITLES[row]
    name, _, compression = row.partition("-")
    return f"{PROCESS_TITLES[name]}, {compression}"


def process_colour(row: str) -> str:
    """The colour of a row of several processes."""
    if row == "horovod-raw":
        return HOROVODS
    ours = row.startswith(("strategy", "horovod-drop-in"))
    return OURS if ours else OTHERS


def draw_processes(rows: list[dict]) -> pyplot.Figure:
    """Draw what exchange costs: a panel for each model and number."""
    rows = [row for row in rows if row["cost_ms"]]
    groups = list(dict.fromkeys((r["model"], r["processes"]) for r in rows))
    names = list(dict.fromkeys(row["row"] for row in rows))
    figure, panels = pyplot.subplots(
        *(1, len(groups)),
        figsize=(3.0 + 2.6 * len(groups), 0.8 + 0.26 * len(names)),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for panel, (model, processes) in zip(panels[0], groups, strict=True):
        mine = [
            row
            for row in rows
            if (row["model"], row["processes"]) == (model, processes)
        ]
        costs = [row["cost_ms"] for row in mine]
        medians = [cost["median"] for cost in costs]
        panel.barh(
            [names.index(row["row"]) for row in mine],
            medians,
            color=[process_colour(row["row"]) for row in mine],
            # The smallest and largest of all repeats.
            xerr=[
                [cost["median"] - cost["low"] for cost in costs],
                [cost["high"] - cost["median"] for cost in costs],
            ],
            error_kw={"lw": 0.8, "ecolor": "#555555"},
        )
        panel.set_title(f"{model}, {processes} processes")
        panel.set_yticks(range(len(names)))
        panel.set_yticklabels([process_title(name) for name in names])
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].invert_yaxis()
    figure.supxlabel(
        "milliseconds a step above compute (lower is better)", fontsize=10
    )
    return figure


def main(
    report: Annotated[Path, typer.Argument(help="what the bench wrote")],
    picture: Annotated[Path, typer.Argument(help="PNG to write")],
) -> None:
    """Draw what a run of the bench measured."""
    document = json.loads(report.read_text())
    if document.get("processes"):
        figure = draw_processes(document["processes"])
    else:
        figure = draw_towers(document["training"])
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
