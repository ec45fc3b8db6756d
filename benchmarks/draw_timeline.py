"""Draws some steps of a trace that ``kt.Timeline`` has written.

``python -m benchmarks.draw_timeline trace.json docs/images/timeline.svg`` drew
the picture of docs/recipes.md, from a job of two ranks with two towers each. It
needs matplotlib, of the extra ``plots``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

STEPS = 3
# In the order of a step; the colors are matplotlib's.
COLORS = {
    "input": "tab:gray",
    "compute": "tab:blue",
    "wait": "lightgray",
    "reduction": "tab:orange",
    "update": "tab:green",
    "callbacks": "tab:purple",
}


def draw(events: list[dict[str, Any]], path: Path) -> None:
    """Draw steps of the last epoch, a line for each tower of each rank.

    Args:
        events: of the trace.
        path: the picture.
    """
    names = {
        (e["pid"], e["tid"], e["name"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and "name" in e["args"]
    }
    lines = sorted({(pid, tid) for pid, tid, _ in names})
    spans = [event for event in events if event["ph"] == "X"]
    asks = [e for e in spans if e["name"] == "input" and e["pid"] == 0]
    # Not the last one, which the callbacks of the epoch follow.
    begin, *_, end = sorted(e["ts"] for e in asks)[-STEPS - 2 : -1]
    figure = Figure((8, 0.3 * len(lines) + 1.1), layout="constrained")
    axis = figure.subplots()
    for event in spans:
        is_shown = begin <= event["ts"] + event["dur"] and event["ts"] < end
        if not is_shown or event["name"] not in COLORS:
            continue
        place = lines.index((event["pid"], event["tid"]))
        axis.barh(
            place,
            event["dur"] / 1000,
            left=(event["ts"] - begin) / 1000,
            color=COLORS[event["name"]],
            height=0.8,
        )
    titles = [
        f"{names[pid, tid, 'process_name']}, {names[pid, tid, 'thread_name']}"
        for pid, tid in lines
    ]
    axis.set_yticks(range(len(lines)), [t.partition(" (")[0] for t in titles])
    axis.invert_yaxis()
    axis.set_xlim(0, (end - begin) / 1000)
    axis.set_xlabel("milliseconds")
    axis.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=c, label=name) for name, c in COLORS.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=6)
    figure.savefig(path)


if __name__ == "__main__":
    trace, picture = map(Path, sys.argv[1:])
    draw(json.loads(trace.read_text())["traceEvents"], picture)
