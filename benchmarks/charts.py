"""Pictures of what was measured; this module needs matplotlib."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.field import FIELD
from keras_towers.bench.rows import ROWS, find
from keras_towers.doctor.probe import describe_machine

# The kinds of rows: their colour, and what the legend says.
KINDS = {
    "default": ("#1f6feb", "keras_towers, default strategy"),
    "ours": ("#8db8f7", "keras_towers, others"),
    "tensorflow": ("#d9822b", "TensorFlow"),
    "horovod": ("#8a5a44", "Horovod"),
    "torch": ("#8e6bb0", "PyTorch"),
    "jax": ("#2a9d8f", "JAX"),
    "plain": ("#9aa0a6", "plain Keras"),
}
# Columns of a picture: the figure, its factor, and its title.
_COLUMNS = (
    ("examples_per_s", 1, "examples per second"),
    ("efficiency", 100, "efficiency, %"),
    ("step_ms", 1, "step, ms: compute (dark) and rest"),
    ("first_step_s", 1, "first step, s"),
)


def kind(name: str) -> str:
    """Return which of ``KINDS`` a row belongs to."""
    row = find({**FIELD, **ROWS}, name)
    if row.name in ("tower", "horovod"):
        return "default"
    if row.ours:
        return "ours"
    if row.name.startswith(("plain", "compute")):
        return "plain"
    return row.engine or row.backend


def draw(document: dict[str, Any]) -> Figure:
    """Draw what a comparison has written to its JSON file.

    There is a panel for each figure, model and number of replicas.
    """
    panels: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in document["results"]:
        key = result["model"], result["replicas"]
        panels.setdefault(key, []).append(result)
    columns = [
        column
        for column in _COLUMNS
        if any(result.get(column[0]) for result in document["results"])
    ]
    heights = [0.9 + 0.24 * len(panel) for panel in panels.values()]
    figure = Figure(
        figsize=(4.5 + 2.7 * len(columns), 1.4 + sum(heights)),
        layout="constrained",
    )
    grid = figure.subplots(
        len(panels),
        len(columns),
        squeeze=False,
        sharey="row",
        height_ratios=heights,
    )
    for across, (key, results) in zip(grid, panels.items(), strict=True):
        for axes, (name, factor, title) in zip(across, columns, strict=True):
            _draw_panel(axes, results, name, factor)
            axes.set_title(title, fontsize=9)
        model, count = key
        noun = "replica" if count == 1 else "replicas"
        title = f"{model}, {count} {noun}: {columns[0][2]}"
        across[0].set_title(title, fontsize=9)
    settings, repeats = document["settings"], document["settings"]["repeats"]
    often = f"median of {repeats} runs" if repeats > 1 else "one run each"
    figure.supxlabel(
        f"{describe_machine(document['machine'])}\nglobal batch "
        f"{settings['batch']}; {often}",
        fontsize=8,
    )
    drawn = {kind(result["row"]) for result in document["results"]}
    figure.legend(
        handles=[
            Patch(color=colour, label=text)
            for name, (colour, text) in KINDS.items()
            if name in drawn
        ],
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_panel(
    axes: Any, results: list[dict[str, Any]], name: str, factor: float
) -> None:
    """Draw a bar for each row, its range, and its value behind both."""
    for place, result in enumerate(results):
        why = "failed" if result["failed"] else "does not count"
        if not result.get(name) and (result["failed"] or result["reason"]):
            axes.text(0, place, f" {why}", va="center", fontsize=8)
    bars = [(k, result) for k, result in enumerate(results) if result.get(name)]
    for place, result in bars:
        low, median, high = (
            factor * result[name][key] for key in ("low", "median", "high")
        )
        colour, _ = KINDS[kind(result["row"])]
        error = [[median - low], [high - median]]
        bar = axes.barh(
            place, median, 0.72, xerr=error, color=colour, ecolor="#444444"
        )
        if name == "step_ms" and result["cost_ms"]:
            compute = max(0, median - max(0, result["cost_ms"]["median"]))
            axes.barh(place, compute, 0.72, color="#000000", alpha=0.35)
        decimals = 2 if median < 10 else 1
        axes.bar_label(bar, fmt=f"%.{decimals}f", padding=3, fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=8)
    axes.set_yticks(range(len(results)), [r["row"] for r in results])
    # Only the first panel of several has labels.
    for label, result in zip(axes.get_yticklabels(), results, strict=False):
        bold = kind(result["row"]) == "default"
        label.set_weight("bold" if bold else "normal")
    axes.set_ylim(len(results) - 0.5, -0.5)
    # Room for the values.
    axes.set_xlim(0, axes.get_xlim()[1] * 1.25)
