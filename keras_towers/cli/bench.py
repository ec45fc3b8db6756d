"""``keras-towers bench``: which rows are compared, and their tables."""

from __future__ import annotations

import json
import pkgutil
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn, TypeAlias

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_towers.cli import installed
from keras_towers.cli.plots import check_plot, draw_plot
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import JsonObject
from keras_towers.foundation.system import check_writable
from keras_towers.inspection.bench.models import MODELS
from keras_towers.inspection.bench.rows import Row, Runs, find_row
from keras_towers.inspection.bench.runner import (
    Cell,
    Result,
    Sample,
    Setting,
    measure_all,
    plan_cells,
)
from keras_towers.inspection.user_models import check_named

OfRow: TypeAlias = Callable[[str, int], float | None]
"""The milliseconds of a row with a number of replicas, in the same repeat."""


@dataclass(frozen=True)
class Column:
    """A column of the table, and its explanation below.

    Attributes:
        title: its head.
        legend: the explanation.
        figure: returns its figure of a run, if there is one; None: every run
            measures it.
        form: how the figure is shown.
        ranges: whether the range over all repeats is shown.
    """

    title: str
    legend: str
    figure: Callable[[Sample, OfRow], float | None] | None = None
    form: str = "{:.2f}"
    ranges: bool = False


def ratio(sample: Sample, milliseconds: Sequence[float | None]) -> float | None:
    """Return a step's time relative to the fastest of others, if any."""
    known = list(filter(None, milliseconds))
    return sample.result["step_ms"] / min(known) if known else None


COLUMNS = {
    "step_ms": Column(
        "ms",
        "milliseconds from the start of one batch to the start of the next: "
        "median over a run, mean over its processes, median over all repeats.",
    ),
    "to_plain": Column(
        "÷ plain",
        "time relative to one device in the same repeat; below it the "
        "smallest and largest of all repeats.",
        lambda sample, of_row: ratio(sample, [of_row("plain", 1)]),
        ranges=True,
    ),
    "first_step_s": Column(
        "first\nstep",
        "seconds from the call of fit to the end of its first batch, in a new "
        "process, including tracing and compilation.",
        form="{:.1f} s",
    ),
    "memory_mb": Column(
        "memory",
        "growth of the resident memory at its peak, from before the model is "
        "built, in all processes together.",
        form="{:.0f} MB",
    ),
    "memory_to_state": Column(
        "÷ state",
        "the same in the process that has most, relative to the bytes of all "
        "weights and of the optimizer's state.",
    ),
}


class Device(StrEnum):
    """The kind of device to run on."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


Names: TypeAlias = Annotated[str, typer.Option(metavar="NAMES")]
Count: TypeAlias = Annotated[int, typer.Option(min=1, metavar="N")]
Numbers: TypeAlias = Annotated[str | None, typer.Option(metavar="NUMBERS")]


def bench(
    models: Names = "large",
    towers: Numbers = None,
    processes: Numbers = None,
    strategies: Names = "",
    steps: Count = 60,
    batch_size: Count = 64,
    repeats: Count = 3,
    device: Annotated[Device, typer.Option(metavar="NAME")] = Device.AUTO,
    memory_limit: Annotated[
        int | None, typer.Option(min=1, metavar="MIB")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, metavar="N")] = 300,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH")] = None,
) -> None:
    """Compare strategies with plain Keras: step times and memory.

    keras-towers bench --models my_module:build --towers 2,4

    The table has a line for plain Keras, and for each strategy and number of
    towers or processes. Ctrl-C shows the
    results so far.

    Args:
        models: Your own model as MODULE:FUNCTION, or small, large, or both. The
            function returns a compiled model, alone or as (model, x, y).
            Without data, the command makes random examples.
        towers: Numbers of towers in one process. Default: 2, 4 or 8, as the
            GPUs or cores allow; none with --processes alone.
        processes: Numbers of processes, for strategies that use several. Each
            process gets one core or GPU.
        strategies: Names of strategies. Default: tower, and with --processes
            multi-worker. Options follow a name, as in
            tower:mode=host,horovod:compression=fp16.
        steps: Steps to time in a run, after 20 warm-up steps.
        batch_size: Examples per step, which all replicas share.
        repeats: Runs for each line of the table.
        device: cpu, gpu, or auto, which uses GPUs if there are enough.
        memory_limit: Split the first GPU into logical GPUs of this many MiB,
            one per tower. They share its cores.
        timeout: Time limit of one run in seconds.
        json_path: Also write all measurements to this file.
        plot: Also draw the step times into this file (.png, .svg, .pdf), with
            matplotlib.
    """
    if towers is None and processes is None:
        towers = "auto"
    if not strategies:
        kinds = {"tower": towers, "multi-worker": processes}
        strategies = ",".join(
            name for name, numbers in kinds.items() if numbers
        )
    compare(
        Setting(device, batch_size, steps, timeout, memory_limit=memory_limit),
        ["plain", *split(strategies)],
        COLUMNS,
        json_path,
        plot,
        models=models,
        towers=towers,
        processes=processes,
        repeats=repeats,
    )


def compare(
    setting: Setting,
    names: Iterable[str],
    columns: Mapping[str, Column],
    json_path: Path | None,
    plot: Path | None = None,
    *,
    models: str,
    towers: str | None,
    processes: str | None,
    repeats: int,
) -> NoReturn:
    """Measure rows, show the results, and exit.

    Args:
        setting: the options of all runs.
        names: the rows, those first that others are relative to.
        columns: the columns of the table; those without figures are left out.
        json_path: a file to write all measurements to.
        plot: a file to draw step times into.
        models: comma-separated names.
        towers: comma-separated numbers, or "auto".
        processes: comma-separated numbers, or "auto".
        repeats: the number of runs per row.
    """
    if json_path:
        check_writable(json_path, "bench")
    if plot:
        check_plot(plot, "bench")
    sources, rows = _parse_models(models), pkgutil.resolve_name(setting.rows)
    numbers = {
        Runs.ONE: [1],
        Runs.DEVICES: _parse_numbers("--towers", towers, 1),
        Runs.RANKS: _parse_numbers("--processes", processes, 2),
    }
    kinds = [runs for runs, counts in numbers.items() if counts]
    chosen = _choose_rows(rows, names, kinds)
    facts = installed.machine_facts(setting.timeout_s)
    setting = _resolve(setting, numbers, facts)
    console = Console()
    cells = plan_cells(chosen, sources, numbers, repeats)
    console.print(
        f"{len(cells)} runs on the {setting.device.upper()}", style="dim"
    )
    measurements = measure_all(cells, chosen, setting, console)
    results = summarize(measurements.samples, columns)
    print_tables(results, chosen, measurements.titles, columns, console)
    _explain(console, installed.describe_machine(facts))
    if json_path:
        document = {
            "machine": facts,
            "settings": asdict(setting),
            "complete": measurements.complete,
            "samples": measurements.samples,
            "results": results,
        }
        text = json.dumps(document, default=asdict, indent=1)
        json_path.write_text(f"{text}\n", encoding="utf-8")
    if plot:
        draw_plot(results, measurements.titles, plot)
    if not measurements.complete:
        raise typer.Exit(130)
    raise typer.Exit(int(any(sample.error for sample in measurements.samples)))


def _resolve(
    setting: Setting, numbers: Mapping[Runs, list[int]], facts: JsonObject
) -> Setting:
    """Choose the device, and the numbers that are not given."""
    gpus = len(facts["gpus"])
    if setting.memory_limit and (setting.device == "cpu" or not gpus):
        raise TowerError(
            f"--memory-limit {setting.memory_limit} splits a GPU, but "
            + ("the device is the CPU" if gpus else "none is visible")
        )
    if setting.memory_limit:
        setting = replace(setting, device="gpu")
    if setting.device == "auto":
        most = max(n or 2 for counts in numbers.values() for n in counts)
        setting = replace(setting, device="gpu" if gpus >= most else "cpu")
    available = gpus if setting.device == "gpu" else facts["cores"]
    # Two towers may share a core.
    fitting = next(n for n in (8, 4, 2) if n <= max(2, available))
    for counts in numbers.values():
        counts[:] = [count or fitting for count in counts]
    everything = [count for counts in numbers.values() for count in counts]
    # One for each process, and for each tower unless they share the first.
    needed = max(
        numbers[Runs.RANKS] if setting.memory_limit else everything, default=1
    )
    if setting.device == "gpu" and gpus < needed:
        raise TowerError(f"{needed} GPUs are needed, but {gpus} are visible")
    for count in everything:
        if setting.batch % count:
            raise TowerError(
                f"{count} replicas cannot share --batch-size {setting.batch} "
                "equally"
            )
    return setting


def _parse_models(text: str) -> list[str]:
    """Split comma-separated names of models and functions."""
    names = split(text)
    unknown = [n for n in names if n not in MODELS and ":" not in n]
    if unknown or not names:
        raise TowerError(
            f"--models {text} is not allowed: choose {', '.join(MODELS)}, or a "
            "function of your own as MODULE:FUNCTION"
        )
    for name in names:
        if name not in MODELS:
            check_named(name)
    return names


def _choose_rows(
    rows: Mapping[str, Row], names: Iterable[str], kinds: Collection[Runs]
) -> dict[str, Row]:
    """Return the rows to measure, by name."""
    chosen = {name: find_row(rows, name) for name in names}
    for name, row in chosen.items():
        if row.missing:
            raise TowerError(f"{name}: {row.missing}")
        if row.runs not in kinds:
            option = "--towers" if row.runs is Runs.DEVICES else "--processes"
            raise TowerError(f"{name} needs {option} N")
    return chosen


def split(text: str) -> list[str]:
    """Split comma-separated words."""
    words = (word.strip() for word in text.split(","))
    return list(dict.fromkeys(filter(None, words)))


def _parse_numbers(option: str, text: str | None, least: int) -> list[int]:
    """Parse comma-separated whole numbers from ``least``; "auto" is 0."""
    if text in (None, "auto"):
        return [] if text is None else [0]
    counts = [int(w) if w.isdecimal() else 0 for w in split(text)]
    if not counts or min(counts) < least:
        raise TowerError(
            f"{option} takes whole numbers from {least}, not '{text}'"
        )
    return counts


def summarize(
    samples: Sequence[Sample], columns: Mapping[str, Column]
) -> list[Result]:
    """Combine all repeats into one result per row, in the order of samples."""
    step_ms = {s.cell: s.result["step_ms"] for s in samples if not s.error}
    repeats: dict[str, list[Sample]] = {}
    for sample in samples:
        repeats.setdefault(sample.cell.title, []).append(sample)
    results = []
    for group in repeats.values():
        cell = group[0].cell
        result = Result(cell.model, cell.replicas, cell.row)
        for sample in group:
            if sample.error:
                result.error = result.error or sample.error
                continue

            def of_row(
                row: str, replicas: int, cell: Cell = sample.cell
            ) -> float | None:
                return step_ms.get(replace(cell, row=row, replicas=replicas))

            for name, column in columns.items():
                figure = sample.result.get(name)
                if column.figure is not None:
                    figure = column.figure(sample, of_row)
                if figure is not None:
                    result.figures.setdefault(name, []).append(figure)
        results.append(result)
    return results


def print_tables(
    results: Sequence[Result],
    rows: Mapping[str, Row],
    titles: Mapping[str, str],
    columns: Mapping[str, Column],
    console: Console,
) -> None:
    """Print a table for each model, with explanations and failures.

    Args:
        results: what to show.
        rows: the rows, by name.
        titles: the titles of the models.
        columns: the columns; those without figures are left out.
        console: where to print.
    """
    columns = {
        name: column
        for name, column in columns.items()
        if any(name in result.figures for result in results)
    }
    for model, title in titles.items():
        of_model = [result for result in results if result.model == model]
        if of_model:
            console.print(_table(title, of_model, columns))
    for column in columns.values():
        title = column.title.replace("\n", " ")
        _explain(console, f"{title}: {column.legend}")
    for name in dict.fromkeys(result.row for result in results):
        if rows[name].note:
            _explain(console, f"{name}: {rows[name].note}.")
    for result in results:
        if result.error:
            where = f"{result.model}, {result.replicas} replicas"
            row = f"[red]failed:[/] {where}, {result.row}"
            console.print(row, highlight=False)
            _explain(console, result.error)


def _explain(console: Console, text: str) -> None:
    """Print a line below a table."""
    console.print(text, style="dim", highlight=False, markup=False)


def _table(
    title: str, results: Sequence[Result], columns: Mapping[str, Column]
) -> Table:
    """Create a table with a section for each number of replicas."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("strategy", overflow="fold")
    rows = [
        [_format(one.figures.get(key), columns[key]) for key in columns]
        for one in results
    ]
    for column, *cells in zip(columns.values(), *rows, strict=True):
        # A long name gives way: half a number on each of two lines is misread.
        lines = [line for cell in cells for line in cell.splitlines()]
        table.add_column(
            column.title,
            justify="right",
            overflow="fold",
            min_width=max(Text.from_markup(line).cell_len for line in lines),
        )
    # Rows that stand alone need no blank lines.
    is_grouped = len({result.replicas for result in results}) < len(results)
    following = [*results[1:], results[-1]]
    for result, after, cells in zip(results, following, rows, strict=True):
        failed = " [red]failed[/]" if result.error else ""
        is_last = is_grouped and result.replicas != after.replicas
        name = result.row + failed
        table.add_row(str(result.replicas), name, *cells, end_section=is_last)
    return table


def _format(figures: Sequence[float] | None, column: Column) -> str:
    """Format a median and, if repeats are compared, their range."""
    if not figures:
        return "–"
    median = column.form.format(statistics.median(figures))
    low, high = min(figures), max(figures)
    if not column.ranges or low == high:
        return median
    low_high = f"{column.form.format(low)}–{column.form.format(high)}"
    return f"{median}\n[dim]{low_high}[/]"
