"""Draw some steps of a trace that ``kt.Timeline`` has written.

Usage: ``python -m benchmarks.plot_timeline trace.json picture.png``; needs
matplotlib, of the extra ``plots``. https://ui.perfetto.dev shows whole traces.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

COLOURS = {
    "input": "#d9822b",
    "compute": "#1f6feb",
    "step": "#1f6feb",
    "wait": "#d0d7de",
    "reduction": "#8e6bb0",
    "update": "#2da44e",
    "callbacks": "#8a5a44",
}


def window(events: list[dict[str, Any]], steps: int) -> tuple[float, float]:
    """Where the last steps but one begin and end, in microseconds."""
    begins: dict[Any, float] = {}
    for index, event in enumerate(events):
        step = event["args"].get("step")
        if step is None and event["name"] == "step":
            # Those of towers that have no step in common have no number.
            step = index
        if step is not None:
            begins[step] = min(begins.get(step, event["ts"]), event["ts"])
    last = sorted(begins.values())[-steps - 1 :]
    if len(last) < 2 or last[0] == last[-1]:
        raise typer.BadParameter(
            "the trace has fewer than two steps: give one of a longer fit."
        )
    return last[0], last[-1]


def draw(trace: dict[str, Any], steps: int) -> pyplot.Figure:
    """Draw a bar for each event, in the rows of the trace."""
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    begin, end = window(events, steps)
    rows = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    figure, axes = pyplot.subplots(
        figsize=(10, 1.2 + 0.45 * len(rows)), layout="constrained"
    )
    drawn = set()
    for event in events:
        inside = begin <= event["ts"] < end
        if not inside or event["name"] not in COLOURS:
            continue
        drawn.add(event["name"])
        axes.barh(
            list(rows).index((event["pid"], event["tid"])),
            event["dur"] / 1e3,
            left=(event["ts"] - begin) / 1e3,
            color=COLOURS[event["name"]],
            height=0.72,
        )
    axes.set_yticks(range(len(rows)), list(rows.values()), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_xlabel("milliseconds", fontsize=8)
    axes.tick_params(left=False, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(
        handles=[
            Patch(color=colour, label=name)
            for name, colour in COLOURS.items()
            if name in drawn
        ],
        loc="outside upper center",
        ncols=len(COLOURS),
        frameon=False,
        fontsize=9,
    )
    return figure


def main(
    trace: Annotated[Path, typer.Argument(help="what kt.Timeline wrote")],
    picture: Annotated[Path, typer.Argument(help="PNG to write")],
    steps: Annotated[int, typer.Option(help="how many steps to draw")] = 3,
) -> None:
    """Draw some steps of a trace."""
    draw(json.loads(trace.read_text()), steps).savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
