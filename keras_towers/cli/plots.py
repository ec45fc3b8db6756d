"""Pictures of what ``keras-towers`` measures and plans, by matplotlib."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.system import check_writable
from keras_towers.inspection.bench.runner import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from keras_towers.inspection.planning import Plan

FORMATS = (".png", ".svg", ".pdf")
_INCHES = 7.0
_BAR_INCHES = 0.28
# Where a step runs, from the top down.
_WHERE = "once", "towers", "exchange", "update"


def check_plot(path: Path, command: str) -> None:
    """Raise an error now if a command cannot draw into a file later."""
    if path.suffix.lower() not in FORMATS:
        raise TowerError(
            f"--plot takes a file that ends in {', '.join(FORMATS)}, not "
            f"'{path}'"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise TowerError(
            "--plot needs matplotlib: pip install 'keras-towers[plots]'"
        )
    check_writable(path, command)


def draw_plot(
    results: Sequence[Result], titles: Mapping[str, str], path: Path
) -> None:
    """Draw bars of the step times of all rows, from 0, with their ranges.

    Args:
        results: the rows; those that failed are left out.
        titles: the titles of the models.
        path: the file.
    """
    by_model = {
        model: [
            r for r in results if r.model == model and "step_ms" in r.figures
        ]
        for model in titles
    }
    drawn = {model: own for model, own in by_model.items() if own}
    if not drawn:
        raise TowerError("--plot has nothing to draw: all runs have failed")
    sizes = [len(own) + 2 for own in drawn.values()]
    with figure_in(path, _BAR_INCHES * sum(sizes)) as figure:
        axes = figure.subplots(len(drawn), squeeze=False, height_ratios=sizes)
        for (model, own), (axis,) in zip(drawn.items(), axes, strict=True):
            _draw_model(axis, own)
            axis.set_title(titles[model], loc="left", fontsize="medium")
            axis.set_xlabel("milliseconds per step (median; line: all repeats)")


def _draw_model(axis: Axes, results: Sequence[Result]) -> None:
    counts = sorted({result.replicas for result in results})
    for place, result in enumerate(results):
        times = result.figures["step_ms"]
        median = statistics.median(times)
        color = f"C{counts.index(result.replicas)}"
        axis.barh(place, median, color=color)
        axis.plot([min(times), max(times)], [place, place], "k", linewidth=1)
        axis.annotate(
            f" {median:.1f}", (max(times), place), va="center", fontsize="small"
        )
    axis.set_yticks(
        range(len(results)),
        [f"{result.row} × {result.replicas}" for result in results],
    )
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.spines[["top", "right"]].set_visible(False)


@contextlib.contextmanager
def figure_in(path: Path, height: float) -> Iterator[Figure]:
    """Write the figure that the block draws into a file.

    Args:
        path: the file, whose name ends as one of matplotlib's formats.
        height: of the figure, in inches.
    """
    from matplotlib.figure import Figure

    figure = Figure((_INCHES, height), layout="constrained")
    yield figure
    figure.savefig(path)


def draw_memory(plans: Sequence[Plan], memory: int | None, path: Path) -> None:
    """Draw what a device has during the operations of a step, into a file.

    Above it is where the operations of the last plan run, level by level.

    Args:
        plans: the plans, each of which has a line.
        memory: the bytes of a device, if given.
        path: the file.
    """
    with figure_in(path, height=5.5) as figure:
        levels, axes = figure.subplots(2, sharex=True, height_ratios=(1, 3))
        _draw_levels(levels, plans[-1])
        for plan in plans:
            number = max(len(plan.over_time) - 1, 1)
            axes.plot(
                [index / number for index in range(len(plan.over_time))],
                [(plan.held + moment.bytes) / 1e9 for moment in plan.over_time],
                label=plan.choice,
            )
        if memory is not None:
            axes.axhline(memory / 1e9, color="k", linestyle=":", label="memory")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("part of the step's operations")
        axes.set_ylabel("GB on a device")
        axes.legend()


def _draw_levels(axes: Axes, plan: Plan) -> None:
    """Draw where the operations of a plan run, with a line at each level."""
    number = max(len(plan.over_time), 1)
    for place, where in enumerate(_WHERE):
        spans = [
            (index / number, 1 / number)
            for index, moment in enumerate(plan.over_time)
            if moment.where == where
        ]
        axes.broken_barh(spans, (place - 0.4, 0.8), color=f"C{place}")
    for index, (last, moment) in enumerate(itertools.pairwise(plan.over_time)):
        if last.level != moment.level:
            axes.axvline((index + 1) / number, color="0.85", zorder=0)
    axes.set_yticks(range(len(_WHERE)), _WHERE)
    axes.invert_yaxis()
    axes.set_title(f"{plan.choice}, level by level", loc="left", fontsize=9)
