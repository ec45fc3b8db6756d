"""The field's results as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers.bench.field import curves
from keras_towers.bench.field.models import title
from keras_towers.bench.field.results import summarize_field
from keras_towers.bench.field.rows import REFERENCE, ROWS
from keras_towers.bench.field.runner import FieldSample
from keras_towers.bench.report import (
    NOTHING,
    add_rows,
    describe_machine,
    show_failures,
)
from keras_towers.bench.results import Spread

# Columns: their titles, the factor and the format of what is shown.
_COLUMNS = {
    "examples_per_s": ("examples\n/s", 1, "{:.0f}"),
    "efficiency": ("effi-\nciency", 100, "{:.0f} %"),
    "step_ms": ("ms", 1, "{:.2f}"),
    "compute_ms": ("com-\npute", 1, "{:.2f}"),
    "rest_ms": ("rest", 1, "{:.2f}"),
    "first_step_s": ("first\nstep", 1, "{:.1f} s"),
    "memory_mb": ("MB", 1, "{:.0f}"),
}
LEGEND = (
    "n: number of devices. examples/s: of the global batch of {batch}, by the "
    "median step (ms). efficiency: that, relative to n times one device of the "
    "same backend. compute: the step of n processes that train on their shares "
    "of the batch and exchange nothing; rest: what is above it. first step: "
    "seconds from the call of fit to the end of its first batch. MB: by how "
    "much the resident memory grows at its peak, from before the model is "
    "built, in all processes together; memory that they share counts in each. "
    "A row without figures does not count: its loss has to be within "
    f"{{tolerance:.1%}} of the reference's ({REFERENCE}) in each of the first "
    "{steps} steps."
)


@dataclass
class Field:
    """A run of the field.

    Attributes:
        facts: about the machine.
        settings: the options, for JSON.
        skipped: why rows are not measured, by their name.
        notes: on the models, for the reader of the tables.
        samples: all that was measured so far.
    """

    facts: dict[str, Any]
    settings: dict[str, Any]
    skipped: Mapping[str, str]
    notes: Sequence[str] = ()
    samples: list[FieldSample] = field(default_factory=list)

    @property
    def cores_note(self) -> str:
        """What the devices are."""
        if self.settings["device"] == "gpu":
            return "Each device is a GPU."
        cores = self.facts["cores"]
        note = f"Each device has one of this machine's {cores} cores"
        if max(self.settings["devices"], default=1) > cores:
            note += "; more devices than cores share them, without efficiency"
        return f"{note}."

    def results(self) -> list[dict[str, Any]]:
        """Return one result per row, model and number of devices."""
        most = self.facts["cores"]
        if self.settings["device"] == "gpu":
            most = max(self.settings["devices"], default=1)
        return summarize_field(self.samples, self.settings["batch_size"], most)

    def document(self) -> dict[str, Any]:
        """Return what is written as JSON."""
        document = {
            "machine": self.facts,
            "settings": self.settings,
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
            "samples": [sample.as_json() for sample in self.samples],
            "field": self.results(),
        }
        return json.loads(json.dumps(document, default=asdict))

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        text = json.dumps(self.document(), indent=1)
        path.write_text(text + "\n", encoding="utf-8")


def show_field(console: Console, run: Field) -> None:
    """Print a table for each model, what does not count, and failures."""
    results = run.results()
    for model in dict.fromkeys(result["model"] for result in results):
        mine = [result for result in results if result["model"] == model]
        console.print(_table(f"{model}: {title(model)}", mine))
        for result in mine:
            if result["reason"] and not result["failed"]:
                console.print(
                    f"[yellow]does not count:[/] {model}, "
                    f"{result['devices']} devices, {result['row']}: "
                    f"{result['reason']}",
                    highlight=False,
                )
    if results:
        legend = LEGEND.format(
            batch=run.settings["batch_size"],
            tolerance=curves.TOLERANCE,
            steps=curves.STEPS,
        )
        _say(console, f"{legend} {run.cores_note}")
    for name in dict.fromkeys(result["row"] for result in results):
        _say(console, f"{name}: {ROWS[name].note}.")
    for note in run.notes:
        _say(console, f"{note}.")
    for name, why in run.skipped.items():
        _say(console, f"skipped: {name}: {why}")
    _say(console, describe_machine(run.facts))
    show_failures(console, run.samples)


def _say(console: Console, text: str) -> None:
    console.print(text, style="dim", highlight=False, markup=False)


def _table(heading: str, results: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=heading, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("row", no_wrap=True)
    for name, _, _ in _COLUMNS.values():
        table.add_column(name, justify="right", no_wrap=True)
    add_rows(
        table,
        [
            (r["devices"], _name(r), *(_shown(r[c], c) for c in _COLUMNS))
            for r in results
        ],
    )
    return table


def _name(result: dict[str, Any]) -> str:
    name = result["row"]
    text = f"[bold]{name}[/]" if ROWS[name].ours else name
    if result["failed"]:
        return f"{text} [red]failed[/]"
    return text if result["counts"] else f"{text} [yellow]✗[/]"


def _shown(spread: Spread | None, column: str) -> str:
    if spread is None:
        return NOTHING
    _, factor, form = _COLUMNS[column]
    return form.format(spread.median * factor)
