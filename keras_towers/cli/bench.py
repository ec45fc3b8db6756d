"""``keras-towers bench``: which rows are compared, and their tables."""

from __future__ import annotations

import json
import pkgutil
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers import doctor
from keras_towers.bench.models import MODELS
from keras_towers.bench.rows import Row, Runs, find_row
from keras_towers.bench.runner import (
    Cell,
    Sample,
    Setting,
    measure_all,
    plan_cells,
)
from keras_towers.cli.bench_plot import check_plot, draw_plot
from keras_towers.errors import TowerError
from keras_towers.system import check_writable


@dataclass(frozen=True)
class Column:
    """A column of the table, and its explanation below."""

    title: str
    legend: str
    form: str = "{:.2f}"
    # Whether the range over all repeats is shown.
    ranges: bool = False


COLUMNS = {
    "examples_per_s": Column(
        "examples\n/s", "of the global batch, by the median step.", "{:.0f}"
    ),
    "efficiency": Column(
        "effi-\nciency",
        "throughput relative to n times one device of the same backend; empty "
        "if devices share cores.",
        "{:.0%}",
    ),
    "step_ms": Column(
        "ms",
        "milliseconds from the start of one batch to the start of the next: "
        "median over a run, mean over its processes, median over all repeats.",
    ),
    "to_plain": Column(
        "÷ plain",
        "time relative to one device in the same repeat; below it the "
        "smallest and largest of all repeats.",
        ranges=True,
    ),
    "to_stock": Column(
        "÷ best\nstock",
        "time relative to the fastest of TensorFlow's own (*) in the same "
        "repeat.",
        ranges=True,
    ),
    "cost_ms": Column(
        "above\ncompute",
        "milliseconds above the compute row of the same repeat, whose "
        "processes train at the same time without exchanging anything.",
        ranges=True,
    ),
    "first_step_s": Column(
        "first\nstep",
        "seconds from the call of fit to the end of its first batch, in a new "
        "process, including tracing and compilation.",
        "{:.1f} s",
    ),
    "epoch_cost_s": Column(
        "epoch", "overhead of fit per epoch, besides the steps.", "{:.2f} s"
    ),
    "memory_mb": Column(
        "memory",
        "growth of the resident memory at its peak, from before the model is "
        "built, in all processes together.",
        "{:.0f} MB",
    ),
}
_SHOWN_COLUMNS = (
    "step_ms",
    "to_plain",
    "to_stock",
    "cost_ms",
    "first_step_s",
    "epoch_cost_s",
    "memory_mb",
)


class Device(StrEnum):
    """Where to run."""

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
    strategies: Names = "default",
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
    """Compare the speed of strategies on a model.

    Each run is a separate process and takes 5 to 15 seconds on a CPU. Ctrl-C
    shows the results so far.

    Args:
        models: Your own model as MODULE:FUNCTION, which returns it compiled,
            alone or as (model, x, y): without data, random examples are made.
            Or some of small, large, cnn.
        towers: Numbers of towers in one process. Default: 2, 4 or 8, whatever
            the GPUs or cores allow; none with --processes alone.
        processes: Numbers of processes, for strategies that use several: one
            core or GPU each.
        strategies: Rows to compare: plain, stock-default, stock-one-device,
            stock-hierarchical, compute, or the names of strategies. Default:
            most of those that are installed. A strategy's options follow its
            name: default,tower:mode=cpu,horovod:compression=fp16.
        steps: Steps to time in a run, after 20 warm-up steps.
        batch_size: Examples per step, however many replicas share them.
        repeats: Runs per row.
        device: cpu, gpu, or auto, which uses GPUs if there are enough of them.
        memory_limit: Split the first GPU into logical ones of so many MiB, one
            for each tower. They show what towers cost, not how fast they are:
            they share its cores.
        timeout: Time limit of one run in seconds.
        json_path: Also write all measurements to this file.
        plot: Also draw the step times into this file (.png, .svg, .pdf), with
            matplotlib.
    """
    if towers is None and processes is None:
        towers = "auto"
    compare(
        Setting(device, batch_size, steps, timeout, memory_limit=memory_limit),
        _SHOWN_COLUMNS,
        json_path,
        plot,
        models=models,
        towers=towers,
        processes=processes,
        strategies=strategies,
        repeats=repeats,
    )


def compare(
    setting: Setting,
    columns: Sequence[str],
    json_path: Path | None,
    plot: Path | None = None,
    *,
    models: str,
    towers: str | None,
    processes: str | None,
    strategies: str,
    repeats: int,
) -> NoReturn:
    """Measure rows, show the results, and exit.

    Args:
        setting: the options of all runs.
        columns: the names of the table's columns.
        json_path: a file to write all measurements to.
        plot: a file to draw step times into.
        models: comma-separated names.
        towers: comma-separated numbers, or "auto".
        processes: comma-separated numbers, or "auto".
        strategies: comma-separated names.
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
    chosen, skipped = _choose_rows(rows, strategies, kinds)
    facts = doctor.machine_facts(setting.timeout_s)
    setting, available = _resolve(setting, numbers, facts)
    console = Console()
    cells = plan_cells(chosen, sources, numbers, repeats)
    console.print(
        f"{len(cells)} runs on the {setting.device.upper()}", style="dim"
    )
    found = measure_all(cells, chosen, setting, console)
    results = summarize(chosen, found.samples, setting.batch, available)
    print_tables(results, chosen, found.titles, columns, console)
    for name, why in skipped.items():
        _explain(console, f"skipped: {name}: {why}")
    _explain(console, doctor.describe_machine(facts))
    if json_path:
        document = {
            "machine": facts,
            "settings": asdict(setting),
            "complete": found.complete,
            "samples": found.samples,
            "results": results,
        }
        text = json.dumps(document, default=asdict, indent=1)
        json_path.write_text(f"{text}\n", encoding="utf-8")
    if plot:
        draw_plot(results, found.titles, plot)
    if not found.complete:
        raise typer.Exit(130)
    raise typer.Exit(int(any(sample.error for sample in found.samples)))


def _resolve(
    setting: Setting, numbers: Mapping[Runs, list[int]], facts: dict[str, Any]
) -> tuple[Setting, int]:
    """Choose the device, and the numbers that are not given.

    Returns:
        The setting, and the number of available devices of its kind.
    """
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
        raise TowerError(f"{needed} GPUs are needed, {gpus} visible")
    for count in everything:
        if setting.batch % count:
            raise TowerError(
                f"{count} replicas cannot share --batch-size {setting.batch} "
                "equally"
            )
    return setting, available


def _parse_models(text: str) -> list[str]:
    """Split comma-separated names of models and functions."""
    names = _split(text)
    unknown = [n for n in names if n not in MODELS and ":" not in n]
    if unknown or not names:
        raise TowerError(
            f"--models {text} is not allowed: choose {', '.join(MODELS)}, or a "
            "function of your own as MODULE:FUNCTION"
        )
    return names


def _choose_rows(
    rows: Mapping[str, Row], text: str, kinds: Collection[Runs]
) -> tuple[dict[str, Row], dict[str, str]]:
    """Return the rows to measure, and why some default rows are skipped."""
    chosen: dict[str, Row] = {}
    skipped = {}
    for name in _split(text):
        if name == "default":
            for row in rows.values():
                if not row.default or row.runs not in kinds:
                    continue
                if row.missing:
                    skipped[row.name] = row.missing
                else:
                    chosen[row.name] = row
            continue
        chosen[name] = row = find_row(rows, name)
        if row.missing:
            raise TowerError(f"{name}: {row.missing}")
        if row.runs not in kinds:
            option = "--towers" if row.runs is Runs.DEVICES else "--processes"
            raise TowerError(f"{name} needs {option} N")
    if not chosen:
        raise TowerError(f"no strategy given; choose {', '.join(rows)}")
    # Rows that other rows are relative to come first.
    first = {row.plain for row in chosen.values()}
    first |= {r.compute for r in chosen.values() if r.runs is Runs.RANKS}
    return {n: r for n, r in rows.items() if n in first} | chosen, skipped


def _split(text: str) -> list[str]:
    """Split comma-separated words."""
    words = (word.strip() for word in text.split(","))
    return list(dict.fromkeys(filter(None, words)))


def _parse_numbers(option: str, text: str | None, least: int) -> list[int]:
    """Parse comma-separated whole numbers from ``least``; "auto" is 0."""
    if text in (None, "auto"):
        return [] if text is None else [0]
    counts = [int(w) if w.isdecimal() else 0 for w in _split(text)]
    if not counts or min(counts) < least:
        raise TowerError(
            f"{option} takes whole numbers from {least}, not '{text}'"
        )
    return counts


@dataclass(frozen=True)
class Result:
    """All repeats of a row.

    Attributes:
        model: the name of its model.
        replicas: its number of replicas.
        row: its name.
        figures: a value for each repeat that did not fail, by column.
        error: why a repeat failed; empty if none did.
    """

    model: str
    replicas: int
    row: str
    figures: dict[str, list[float]]
    error: str


def summarize(
    rows: Mapping[str, Row], samples: Sequence[Sample], batch: int, devices: int
) -> list[Result]:
    """Combine all repeats into one result per row, in the order of samples.

    Args:
        rows: the rows, by name.
        samples: the measurements.
        batch: examples in a global batch.
        devices: the number of devices of the machine.
    """
    step_ms = {s.cell: s.result["step_ms"] for s in samples if not s.error}
    repeats: dict[str, list[Sample]] = {}
    for sample in samples:
        repeats.setdefault(sample.cell.title, []).append(sample)
    results = []
    for group in repeats.values():
        cell = group[0].cell
        figures: dict[str, list[float]] = {}
        for sample in group:
            if sample.error:
                continue
            found = _compute_figures(sample, rows, step_ms, batch, devices)
            for name, figure in found.items():
                if figure is not None:
                    figures.setdefault(name, []).append(figure)
        error = next((sample.error for sample in group if sample.error), "")
        results.append(
            Result(cell.model, cell.replicas, cell.row, figures, error)
        )
    return results


def _compute_figures(
    sample: Sample,
    rows: Mapping[str, Row],
    step_ms: Mapping[Cell, float],
    batch: int,
    devices: int,
) -> dict[str, float | None]:
    """Return the columns of one run, relative to rows of the same repeat."""
    cell, result = sample.cell, sample.result
    row, ms = rows[cell.row], step_ms[cell]
    plain = step_ms.get(replace(cell, row=row.plain, replicas=1))
    compute = step_ms.get(replace(cell, row=row.compute))
    stock_cells = (replace(cell, row=name) for name in rows if rows[name].stock)
    stock = [step_ms[other] for other in stock_cells if other in step_ms]
    # Efficiency is meaningless if devices share cores.
    has_own_devices = 1 < cell.replicas <= devices
    return {
        "examples_per_s": 1e3 * batch / ms,
        "efficiency": plain / ms / cell.replicas
        if plain and has_own_devices
        else None,
        "step_ms": ms,
        "to_plain": plain and ms / plain,
        "to_stock": ms / min(stock) if stock else None,
        "cost_ms": None if row.alone or not compute else ms - compute,
        "first_step_s": result["first_step_s"],
        "epoch_cost_s": result["epoch_cost_s"],
        "memory_mb": result["memory_mb"],
    }


def print_tables(
    results: Sequence[Result],
    rows: Mapping[str, Row],
    titles: Mapping[str, str],
    names: Sequence[str],
    console: Console,
) -> None:
    """Print a table for each model, with explanations and failures.

    Args:
        results: what to show.
        rows: the rows, by name.
        titles: the titles of the models.
        names: the columns; columns without figures are left out.
        console: where to print.
    """
    columns = {
        name: COLUMNS[name]
        for name in names
        if any(name in result.figures for result in results)
    }
    for model, title in titles.items():
        of_model = [result for result in results if result.model == model]
        if of_model:
            console.print(_table(title, of_model, rows, columns))
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
    title: str,
    results: Sequence[Result],
    rows: Mapping[str, Row],
    columns: Mapping[str, Column],
) -> Table:
    """Create a table with a section for each number of replicas."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for column in columns.values():
        table.add_column(column.title, justify="right", overflow="fold")
    for replicas, group in groupby(results, lambda result: result.replicas):
        for result in group:
            name = f"{result.row} *" if rows[result.row].stock else result.row
            if result.error:
                name += " [red]failed[/]"
            cells = (
                _format(result.figures.get(key), column)
                for key, column in columns.items()
            )
            table.add_row(str(replicas), name, *cells)
        table.add_section()
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
