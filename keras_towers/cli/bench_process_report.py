"""The table of the benchmark of several processes."""

from __future__ import annotations

from collections.abc import Sequence

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
from keras_towers.cli.bench_process_summary import ProcessRow
from keras_towers.cli.bench_rows import NOTES, OUR_ROWS


def show_processes(
    console: Console, rows: Sequence[ProcessRow], before_range: str
) -> None:
    """Print a table per model, and what the rows are.

    Args:
        console: where to print.
        rows: what was measured.
        before_range: what stands between a median and its range.
    """
    for model in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == model]
        console.print(_table(model, of_model, before_range))
    console.print(
        "ms: milliseconds a step, the median of all ranks of a run and then of "
        "all repeats. cost: how many of them are above compute of the same "
        "repeat, where the same processes train at the same time and exchange "
        "nothing. ÷ raw: that cost divided by raw Horovod's. Beside them stand "
        "the smallest and largest of all repeats. epoch: what an epoch of fit "
        "costs beside its steps.",
        style="dim",
    )
    measured = {row.row for row in rows}
    for name, note in NOTES.items():
        if any(row.startswith(name) for row in measured):
            console.print(f"{name}: {note}.", style="dim", highlight=False)


def _table(model: str, rows: Sequence[ProcessRow], before_range: str) -> Table:
    table = Table(
        title=f"{model}: {MODELS[model].title}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("processes", justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for title in ("ms", "cost", "÷ raw"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    add_sections(
        table,
        [
            (
                row.processes,
                [
                    _name(row),
                    number(row.step_ms.median) if row.step_ms else NOTHING,
                    spread(row.cost_ms, before_range),
                    spread(row.to_raw, before_range),
                    epoch(row.epoch_cost_s),
                ],
            )
            for row in rows
        ],
    )
    return table


def _name(row: ProcessRow) -> str:
    style = "bold" if row.row in OUR_ROWS else "default"
    text = f"[{style}]{row.row}[/]"
    if row.how:
        text += f" ({row.how})"
    if row.failed:
        text += " [red]failed[/]"
    return text
