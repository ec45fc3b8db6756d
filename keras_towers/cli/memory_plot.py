"""A picture of the memory of a device during a planned step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_towers.planning import Plan


def draw_memory(plans: Sequence[Plan], memory: int | None, path: Path) -> None:
    """Draw what a device has during the operations of a step, into a file.

    Args:
        plans: the plans, each of which has a line.
        memory: the bytes of a device, if given.
        path: the file, whose name ends as one of matplotlib's formats.
    """
    from matplotlib.figure import Figure

    figure = Figure((7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for plan in plans:
        number = max(len(plan.over_time) - 1, 1)
        axes.plot(
            [index / number for index in range(len(plan.over_time))],
            [(plan.held + bytes_) / 1e9 for bytes_ in plan.over_time],
            label=plan.choice,
        )
    if memory is not None:
        axes.axhline(memory / 1e9, color="k", linestyle=":", label="memory")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("part of the step's operations")
    axes.set_ylabel("GB on a device")
    axes.legend()
    figure.savefig(path)
