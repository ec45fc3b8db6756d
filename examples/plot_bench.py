"""Draw what ``keras-towers bench --json FILE`` measured.

Usage: ``python examples/plot_bench.py bench.json docs/images/bench.png``; needs
matplotlib, of the extra ``plots``. What ``bench --processes`` wrote gives
another picture, of what each way to exchange gradients costs.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import matplotlib
import typer

from keras_towers.bench.report import describe_machine

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

# What a bar may belong to: its colour, and what the legend says.
KINDS = {
    "default": ("#1f6feb", "keras_towers, default strategy"),
    "ours": ("#8db8f7", "keras_towers, others"),
    "tensorflow": ("#d9822b", "TensorFlow"),
    "horovod": ("#8a5a44", "Horovod"),
    "pytorch": ("#8e6bb0", "PyTorch"),
    "plain": ("#9aa0a6", "plain Keras, one device"),
}
TITLES = {
    "plain": "plain Keras",
    "stock-default": "MirroredStrategy",
    "stock-one-device": "MirroredStrategy, one device",
    "stock-hierarchical": "MirroredStrategy, hierarchical",
    "towers": "TowerStrategy",
    "parameter-server": "ParameterServerTowerStrategy",
    "async": "AsyncTowerStrategy, whole batches",
    "horovod-raw": "Horovod, grouped_allreduce by hand",
    "horovod-drop-in": "keras_towers.horovod",
    "strategy": "HorovodStrategy",
    "strategy-none": "HorovodStrategy, exact by Horovod",
    "multi-worker": "MultiWorkerTowerStrategy",
    "multi-worker-ring": "MultiWorkerTowerStrategy, ring",
    "byteps": "BytePSStrategy",
    "sync-replicas-1ps": "SyncReplicasStrategy, 1 ps",
    "sync-replicas-2ps": "SyncReplicasStrategy, 2 ps",
    "distributed-parameter-server-1ps": "DistributedParameterServer, 1 ps",
    "distributed-parameter-server-2ps": "DistributedParameterServer, 2 ps",
    "stock-loop": "MultiWorkerMirroredStrategy, own loop",
    "torch-ddp": "PyTorch DDP, gloo (above PyTorch alone)",
}


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
# A row's median, smallest and largest value.
Panel = dict[str, dict[str, float]]


def title(row: str) -> str:
    """What a row is called; rows that are not listed are variants."""
    if row in TITLES:
        return TITLES[row]
    name, _, variant = row.partition("-")
    return f"{TITLES[name]}, {variant}"


def kind(row: str) -> str:
    """Which of ``KINDS`` a row belongs to."""
    if row in ("towers", "strategy"):
        return "default"
    theirs = {"stock": "tensorflow", "torch": "pytorch", "plain": "plain"}
    if row == "horovod-raw":
        return "horovod"
    return theirs.get(row.partition("-")[0], "ours")


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
    figure.legend(
        handles=[
            Patch(color=colour, label=said)
            for which, (colour, said) in KINDS.items()
            if which in map(kind, rows)
        ],
        loc="outside upper center",
        ncols=4 if len(counts) > 1 else 3,
        frameon=False,
        fontsize=9,
    )
    return figure


def draw_panel(axes: Any, panel: Panel, rows: list[str]) -> None:
    """Draw a bar for each row, its range, and its value behind both."""
    for place, row in enumerate(rows):
        if row not in panel:
            continue
        low, median, high = (panel[row][k] for k in ("low", "median", "high"))
        axes.barh(place, median, color=KINDS[kind(row)][0], height=0.72)
        axes.plot([low, high], [place, place], color="#444444", lw=0.9)
        axes.annotate(
            f"{median:.2f}" if median < 10 else f"{median:.1f}",
            (max(high, median), place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            weight="bold" if kind(row) == "default" else "normal",
        )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=8)


def label_rows(axes: Any, rows: list[str]) -> None:
    """Name the rows, with our default in bold, the first on top."""
    axes.set_yticks(range(len(rows)), [title(row) for row in rows], fontsize=8)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_weight("bold" if kind(row) == "default" else "normal")
    axes.set_ylim(len(rows) - 0.5, -0.5)


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
