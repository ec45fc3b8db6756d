"""Draw what ``scaling.py`` has measured.

Run it with ``python -m benchmarks.plot_scaling JSON [JSON ...] PNG``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

from keras_towers.doctor.probe import describe_machine, machine_facts

_Row = dict[str, Any]
_ENGINES = {
    "HorovodStrategy": ("Horovod, by rank", "#8a5a44"),
    "MultiWorkerTowerStrategy": ("multi-worker, by rank", "#d9822b"),
    "DistributedParameterServerStrategy": ("one server, at it", "#1f6feb"),
}


def _per_s(row: _Row) -> float:
    return float(row["requests_first"] / row["seconds"])


def draw(rows: list[_Row], machine: str) -> Figure:
    """Draw requests, seconds and bytes against the number of ranks."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    requests, seconds, sent = figure.subplots(1, 3)

    def plot(
        axes: Any,
        what: str,
        value: Callable[[_Row], float],
        label: str,
        colour: str,
    ) -> None:
        found = sorted(
            (r["ranks"], value(r)) for r in rows if r["what"] == what
        )
        # Others lie on the line of the ring.
        style = "o:" if what.startswith("MultiWorker") else "o-"
        axes.plot(*zip(*found, strict=True), style, label=label, color=colour)

    plot(requests, "idle", _per_s, "training", "#1f6feb")
    plot(requests, "stall", _per_s, "all wait for one", "#d9822b")
    requests.set_title("requests a second, at the store", fontsize=9)
    plot(
        seconds, "meet", lambda r: r["seconds"], "met by themselves", "#1f6feb"
    )
    plot(seconds, "launch", lambda r: r["seconds"], "by ssh", "#d9822b")
    plot(
        seconds,
        "launch",
        lambda r: r["launcher_cpu_s"],
        "by ssh: CPU of the launcher",
        "#9aa0a6",
    )
    seconds.set_title("seconds until all have met, on two cores", fontsize=9)
    for what, (label, colour) in _ENGINES.items():
        plot(
            sent,
            what,
            lambda r: r["sent_first"] / r["steps"] / 1e6,
            label,
            colour,
        )
    sent.set_title("MB sent in a step, for 1 MB of gradients", fontsize=9)
    for axes in (requests, seconds, sent):
        axes.set_xlabel("ranks")
        axes.set_ylim(0)
        axes.set_xlim(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.supxlabel(machine, fontsize=8)
    return figure


def main(
    files: Annotated[list[Path], typer.Argument(help="JSON ..., PNG to write")],
) -> None:
    """Draw the rows of some files."""
    *results, picture = files
    rows = [row for file in results for row in json.loads(file.read_text())]
    machine = describe_machine(machine_facts(timeout_s=60))
    draw(rows, machine).savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
