"""The benchmark's results as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers.bench.models import MODELS
from keras_towers.bench.results import Spread, summarize, summarize_adoption
from keras_towers.bench.rows import SUITES, TOWERS, Suite
from keras_towers.bench.runner import Sample

NOTHING = "–"
# From this terminal width on, a ratio and its range fit on one line.
_WIDE = 105


# Columns with a unit: their decimals, and the unit.
_UNITS = {"epoch_cost_s": (2, "s"), "first_step_s": (1, "s")}
_UNITS |= {"memory_mb": (0, "MB")}
# Titles of columns, and their explanations below the table.
_Columns = dict[str, tuple[str, str]]
_COLUMNS: _Columns = {
    "step_ms": (
        "ms",
        "ms: milliseconds from the start of one batch to the start of the "
        "next: median over a run and its processes, then over all repeats.",
    ),
    "to_plain": ("÷ plain", ""),
    "to_stock_default": ("÷ stock\ndefault", ""),
    "to_best_stock": (
        "÷ best\nstock",
        "Ratios below 1 mean less time than the row in the denominator; next "
        "to them are the smallest and largest of all repeats. *: best stock.",
    ),
    "cost_ms": (
        "cost",
        "cost: communication overhead: milliseconds above the compute row of "
        "the same repeat, where the same processes train concurrently without "
        "exchanging anything.",
    ),
    "to_raw": (
        "÷ raw",
        "÷ raw: that overhead divided by raw Horovod's. Next to them are the "
        "smallest and largest of all repeats.",
    ),
    "epoch_cost_s": (
        "epoch",
        "epoch: per-epoch overhead of fit, in addition to the steps.",
    ),
}
_START: _Columns = {
    "first_step_s": (
        "first\nstep",
        "first step: seconds from the call of fit to the end of its first "
        "batch, in a new process, with all that is traced and compiled for it.",
    ),
    "first_step_s_to_plain": ("÷ plain", ""),
    "first_step_s_to_best_stock": ("÷ best\nstock", ""),
    "memory_mb": (
        "memory",
        "memory: growth of a process's resident memory, at its peak, from "
        "before the model is built. Best stock is the stock row that needs "
        "least of each.",
    ),
    "memory_mb_to_plain": ("÷ plain", ""),
    "memory_mb_to_best_stock": ("÷ best\nstock", ""),
}


def show_report(
    console: Console, facts: dict[str, Any], samples: Sequence[Sample]
) -> None:
    """Print tables of the results, and the failures."""
    adoption = summarize_adoption(samples)
    for suite in SUITES.values():
        results = summarize(suite, samples)
        for model in dict.fromkeys(result["model"] for result in results):
            of_model = [r for r in results if r["model"] == model]
            title = f"{model}: {MODELS[model].title}"
            _show_table(console, title, suite, of_model, _COLUMNS)
            title = f"{model}: until it trains"
            _show_table(console, title, suite, of_model, _START)
        if adoption and suite is TOWERS:
            console.print(_adoption_table(adoption))
        if results:
            explained = _COLUMNS | _START
            legends = [explained.get(c, ("", ""))[1] for c in suite.columns]
            console.print(" ".join(filter(None, legends)), style="dim")
        names = [result[suite.row_key] for result in results]
        for row in suite.rows.values():
            if row.note and any(name.startswith(row.name) for name in names):
                text = f"{row.name}: {row.note}."
                console.print(text, style="dim", highlight=False)
    console.print(describe_machine(facts), style="dim", highlight=False)
    show_failures(console, samples)


def describe_machine(facts: dict[str, Any]) -> str:
    """Describe what figures were measured on, for a caption."""
    versions = ", ".join(
        f"{name} {facts[name.lower()]}"
        for name in ("TensorFlow", "Keras", "Horovod", "Torch", "JAX", "Python")
        if facts.get(name.lower())
    )
    devices = ", ".join(facts["gpus"]) or "no GPU"
    cores = f"{facts['processor']}, {facts['cores']} cores"
    return f"{cores}, {devices}; {versions}"


def _show_table(
    console: Console,
    title: str,
    suite: Suite,
    results: Sequence[dict[str, Any]],
    known: _Columns,
) -> None:
    """Print those of the known columns that the suite has."""
    columns = [column for column in suite.columns if column in known]
    if not any(result[column] for result in results for column in columns):
        return
    separator = " " if console.width >= _WIDE else "\n"
    table = _table(
        title,
        suite,
        [known[column][0] for column in columns],
        results,
        lambda result: [_cell(c, result[c], separator) for c in columns],
    )
    console.print(table)


def _cell(column: str, spread: Spread | None, separator: str) -> str:
    """Format a median and, where repeats are compared, their range."""
    if spread is None:
        return NOTHING
    if column in _UNITS:
        digits, unit = _UNITS[column]
        return f"{spread.median:.{digits}f} {unit}"
    median, low, high = (
        f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
        for value in (spread.median, spread.low, spread.high)
    )
    if column == "step_ms" or spread.low == spread.high:
        return median
    return f"{median}{separator}[dim]{low}–{high}[/]"


def _adoption_table(results: Sequence[dict[str, Any]]) -> Table:
    def cells(result: dict[str, Any]) -> list[str]:
        if result["failed"]:
            return [NOTHING] * 5
        return [
            f"{result['first_adopt_s']:.3f} s",
            f"{result['adopt_s']:.3f} s",
            f"{result['adopt_s'] / result['copy_s']:.1f}",
            f"{result['release_s']:.3f} s",
            f"{result['release_s'] / result['copy_s']:.1f}",
        ]

    title = "Adopting and releasing a 100 MB model"
    columns = ["first", "again", "÷ copy", "release", "÷ copy"]
    table = _table(title, TOWERS, columns, results, cells)
    table.caption = "÷ copy: relative to the time of one copy by numpy"
    return table


def _table(
    title: str,
    suite: Suite,
    columns: Sequence[str],
    results: Sequence[dict[str, Any]],
    cells: Callable[[dict[str, Any]], list[str]],
) -> Table:
    """Create a table with a section for each number of replicas."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(suite.replicas, justify="right")
    table.add_column("strategy", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    add_rows(
        table,
        [(r[suite.replicas], _name(suite, r), *cells(r)) for r in results],
    )
    return table


def add_rows(table: Table, rows: Iterable[tuple[Any, ...]]) -> None:
    """Add rows in a section for each number of replicas.

    Args:
        table: the table.
        rows: the number, which only the first one of a section shows, and the
            texts of the other columns.
    """
    before = None
    for count, *texts in rows:
        if before not in (None, count):
            table.add_section()
        table.add_row("" if count == before else str(count), *texts)
        before = count


def _name(suite: Suite, result: dict[str, Any]) -> str:
    name, choice = result[suite.row_key], result.get(suite.choice_key)
    text = f"[bold]{name}[/]" if suite.rows[name].ours else name
    # Some names already contain it.
    if choice and not name.endswith(choice):
        text += f" ({choice})"
    if name == result.get("best_stock"):
        text += " *"
    return text + (" [red]failed[/]" if result["failed"] else "")


def show_failures(console: Console, samples: Sequence[Sample]) -> None:
    """Print each error once, with the titles of the cells that it ended."""
    cells_by_error: dict[str, list[str]] = {}
    for sample in samples:
        if sample.error:
            titles = cells_by_error.setdefault(sample.error, [])
            titles.append(sample.cell.title)
    for error, titles in cells_by_error.items():
        console.print(f"[red]failed:[/] {'; '.join(titles)}", highlight=False)
        console.print(
            error, style="dim", markup=False, highlight=False, soft_wrap=True
        )


def write_json(
    path: Path,
    facts: dict[str, Any],
    settings: dict[str, Any],
    samples: Sequence[Sample],
) -> None:
    """Write the machine, the settings, every raw sample and the summary."""
    document = {
        "machine": facts,
        "settings": settings,
        "samples": [sample.as_json() for sample in samples],
        "adoption": summarize_adoption(samples),
        **{kind: summarize(suite, samples) for kind, suite in SUITES.items()},
    }
    text = json.dumps(document, indent=1, default=asdict)
    path.write_text(text + "\n", encoding="utf-8")
