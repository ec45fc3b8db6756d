"""The figures of all rows, relative to one another, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers.bench.rows import Row
from keras_towers.bench.runner import Cell, Sample


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


@dataclass
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
    figures: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""


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
    results: dict[str, Result] = {}
    for sample in samples:
        cell = sample.cell
        result = results.setdefault(
            cell.title, Result(cell.model, cell.replicas, cell.row)
        )
        if sample.error:
            result.error = sample.error
            continue
        figures = _compute_figures(sample, rows, step_ms, batch)
        # Efficiency is meaningless if devices share cores.
        if not 1 < cell.replicas <= devices:
            figures["efficiency"] = None
        for name, figure in figures.items():
            if figure is not None:
                result.figures.setdefault(name, []).append(figure)
    return list(results.values())


def _compute_figures(
    sample: Sample,
    rows: Mapping[str, Row],
    step_ms: Mapping[Cell, float],
    batch: int,
) -> dict[str, float | None]:
    """Return the columns of one run, relative to rows of the same repeat."""
    cell, result = sample.cell, sample.result
    row, ms = rows[cell.row], step_ms[cell]
    plain = step_ms.get(replace(cell, row=row.plain, replicas=1))
    compute = step_ms.get(replace(cell, row=row.compute))
    stock_cells = (replace(cell, row=name) for name in rows if rows[name].stock)
    stock = [step_ms[other] for other in stock_cells if other in step_ms]
    return {
        "examples_per_s": 1e3 * batch / ms,
        "efficiency": plain and plain / ms / cell.replicas,
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
        explain(console, f"{title}: {column.legend}")
    for name in dict.fromkeys(result.row for result in results):
        if rows[name].note:
            explain(console, f"{name}: {rows[name].note}.")
    for result in results:
        if result.error:
            where = f"{result.model}, {result.replicas} replicas"
            row = f"[red]failed:[/] {where}, {result.row}"
            console.print(row, highlight=False)
            explain(console, result.error)


def explain(console: Console, text: str) -> None:
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
