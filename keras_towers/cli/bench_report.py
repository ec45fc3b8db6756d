"""Showing the benchmark's results: tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers.cli.bench_cells import (
    NOTHING,
    add_sections,
    epoch,
    number,
    spread,
)
from keras_towers.cli.bench_models import MODELS
from keras_towers.cli.bench_process_report import show_processes
from keras_towers.cli.bench_process_summary import summarize_processes
from keras_towers.cli.bench_runner import Sample
from keras_towers.cli.bench_strategies import OURS
from keras_towers.cli.bench_summary import (
    AdoptionRow,
    TrainingRow,
    summarize_adoption,
    summarize_training,
)

# From so many columns on, a ratio and its range stand on one line.
_WIDE = 105


def show_report(
    console: Console, facts: dict[str, Any], samples: Sequence[Sample]
) -> None:
    """Print the tables of what was measured, and what failed.

    Args:
        console: where to print.
        facts: what is known of the machine.
        samples: what was measured, perhaps only a part of the plan.
    """
    training = summarize_training(samples)
    before_range = " " if console.width >= _WIDE else "\n"
    for model in dict.fromkeys(row.model for row in training):
        rows = [row for row in training if row.model == model]
        console.print(_training_table(model, rows, before_range))
    adoption = summarize_adoption(samples)
    if adoption:
        console.print(_adoption_table(adoption))
    if training:
        console.print(
            "ms: milliseconds from the begin of one batch to the begin of the "
            "next (async: the mean over some rounds of its towers), the median "
            "of a run and then of all repeats. A ratio below "
            "1 means less time than the row it is divided by; beside it stand "
            "the smallest and largest of all repeats. *: best stock. epoch: "
            "what an epoch of fit costs beside its steps.",
            style="dim",
        )
    processes = summarize_processes(samples)
    if processes:
        show_processes(console, processes, before_range)
    console.print(describe_machine(facts), style="dim", highlight=False)
    _show_failures(console, samples)


def describe_machine(facts: dict[str, Any]) -> str:
    """Put the machine and the versions into one line."""
    devices = ", ".join(facts["gpus"]) or "no GPU"
    names = ("TensorFlow", "Keras", "Horovod", "Torch", "Python")
    versions = [
        f"{name} {facts[name.lower()]}"
        for name in names
        if facts.get(name.lower())
    ]
    return (
        f"{facts['processor']}, {facts['cores']} cores, {devices}; "
        f"{', '.join(versions)}"
    )


def _table(title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("towers", justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    return table


def _training_table(
    model: str, rows: Sequence[TrainingRow], before_range: str
) -> Table:
    table = _table(f"{model}: {MODELS[model].title}")
    for title in ("ms", "÷ plain", "÷ stock\ndefault", "÷ best\nstock"):
        table.add_column(title, justify="right")
    table.add_column("epoch", justify="right", no_wrap=True)
    add_sections(
        table,
        [
            (
                row.towers,
                [
                    _name(row),
                    number(row.step_ms.median) if row.step_ms else NOTHING,
                    spread(row.to_plain, before_range),
                    spread(row.to_stock_default, before_range),
                    spread(row.to_best_stock, before_range),
                    epoch(row.epoch_cost_s),
                ],
            )
            for row in rows
        ],
    )
    return table


def _name(row: TrainingRow | AdoptionRow) -> str:
    style = "bold" if row.strategy in OURS else "default"
    text = f"[{style}]{row.strategy}[/]"
    if isinstance(row, TrainingRow):
        if row.mode and row.strategy != f"towers-{row.mode}":
            text += f" ({row.mode})"
        if row.strategy == row.best_stock:
            text += " *"
    if row.failed:
        text += " [red]failed[/]"
    return text


def _adoption_table(rows: Sequence[AdoptionRow]) -> Table:
    table = _table("Taking a 100 MB model over, and giving it back")
    for title in ("first", "again", "÷ copy", "release", "÷ copy"):
        table.add_column(title, justify="right")
    for row in rows:
        cells = [NOTHING] * 5
        if not row.failed:
            cells = [
                f"{row.first_adopt_s:.3f} s",
                f"{row.adopt_s:.3f} s",
                f"{row.adopt_s / row.copy_s:.1f}",
                f"{row.release_s:.3f} s",
                f"{row.release_s / row.copy_s:.1f}",
            ]
        table.add_row(str(row.towers), _name(row), *cells)
    table.caption = "÷ copy: divided by the time numpy takes to copy it once"
    return table


def _show_failures(console: Console, samples: Sequence[Sample]) -> None:
    rows_by_error: dict[str, list[str]] = {}
    for sample in samples:
        if sample.error:
            rows_by_error.setdefault(sample.error, []).append(sample.job.title)
    for error, rows in rows_by_error.items():
        console.print(f"[red]failed:[/] {'; '.join(rows)}", highlight=False)
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
    as_dict = dataclasses.asdict
    document = {
        "machine": facts,
        "settings": settings,
        "samples": [as_dict(sample) for sample in samples],
        "training": [as_dict(row) for row in summarize_training(samples)],
        "adoption": [as_dict(row) for row in summarize_adoption(samples)],
        "processes": [as_dict(row) for row in summarize_processes(samples)],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
