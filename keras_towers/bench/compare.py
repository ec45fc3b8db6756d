"""A comparison of strategies: its measurements, results and tables."""

from __future__ import annotations

import json
import math
import signal
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from keras_towers.bench.rows import Row, Runs
from keras_towers.bench.runner import Sample, Setting, plan, run_cell, store
from keras_towers.doctor import probe
from keras_towers.system import handled

# A measurement of one row, by repeat.
Repeats = Mapping[int, float]
# Of two losses, relative to plain Keras's. Other orders of summation stay far
# below it; a mean over other examples, or another optimizer, far above.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Spread:
    """The median of several repeats, and their minimum and maximum."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Summarize one value per repeat; None if there are no values."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.median(known), min(known), max(known))


@dataclass(frozen=True)
class Column:
    """A column of the table, and its explanation below."""

    title: str
    legend: str
    form: str = "{:.2f}"
    # Whether the smallest and largest of all repeats are shown.
    ranges: bool = False


COLUMNS = {
    "examples_per_s": Column(
        "examples\n/s", "of the global batch, by the median step.", "{:.0f}"
    ),
    "efficiency": Column(
        "effi-\nciency",
        "throughput relative to n times one device of the same backend; none "
        "where devices share cores.",
        "{:.0%}",
    ),
    "step_ms": Column(
        "ms",
        "milliseconds from the start of one batch to the start of the next: "
        "median over a run and its processes, then over all repeats.",
    ),
    "to_plain": Column(
        "÷ plain",
        "time relative to one device in the same repeat; next to it the "
        "smallest and largest of all repeats.",
        ranges=True,
    ),
    "to_stock": Column(
        "÷ best\nstock",
        "time relative to the fastest row of TensorFlow's own (*).",
        ranges=True,
    ),
    "cost_ms": Column(
        "above\ncompute",
        "milliseconds above the compute row of the same repeat, where as many "
        "processes train concurrently without exchanging anything.",
        ranges=True,
    ),
    "first_step_s": Column(
        "first\nstep",
        "seconds from the call of fit to the end of its first batch, in a new "
        "process, with all that is traced and compiled for it.",
        "{:.1f} s",
    ),
    "epoch_cost_s": Column(
        "epoch", "per-epoch overhead of fit, beside the steps.", "{:.2f} s"
    ),
    "memory_mb": Column(
        "memory",
        "growth of the resident memory at its peak, from before the model is "
        "built, in all processes together.",
        "{:.0f} MB",
    ),
}


def summarize(
    rows: Mapping[str, Row],
    samples: Sequence[Sample],
    batch: int,
    devices: int,
    exact: bool = False,
) -> list[dict[str, Any]]:
    """Combine all repeats into one result per row, in the order of samples.

    Args:
        rows: the rows, by name.
        samples: what was measured.
        batch: examples of a global batch.
        devices: how many the machine has.
        exact: whether a row counts only if its losses are those of plain Keras.
    """
    refused = _refused(rows, samples) if exact else {}
    groups: dict[tuple[str, int, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.cell.key, []).append(sample)
    # The median step of each repeat that did not fail, of rows that count.
    steps: dict[tuple[str, int, str], Repeats] = {
        key: {
            s.cell.repeat: statistics.median(s.result["step_ms"])
            for s in repeats
            if not (s.error or key in refused)
        }
        for key, repeats in groups.items()
    }
    results = []
    for key, repeats in groups.items():
        model, replicas, name = key
        row, times = rows[name], steps[key]
        stock = {
            other: statistics.median(of.values())
            for (*where, other), of in steps.items()
            if where == [model, replicas] and of and rows[other].stock
        }
        best = min(stock, key=stock.__getitem__, default="")
        plain = steps.get((model, 1, row.plain), {})
        fastest = steps.get((model, replicas, best), {})
        compute: Repeats = {}
        if not row.alone:
            compute = steps.get((model, replicas, row.compute), {})
        measured = [s.result for s in repeats if not s.error]
        counted = [] if key in refused else measured
        results.append(
            {
                "model": model,
                "replicas": replicas,
                "row": name,
                "examples_per_s": Spread.of(
                    1e3 * batch / ms for ms in times.values()
                ),
                "efficiency": Spread.of(
                    plain[r] / times[r] / replicas
                    for r in times
                    if r in plain and 1 < replicas <= devices
                ),
                "step_ms": Spread.of(times.values()),
                "to_plain": ratio(times, plain),
                "to_stock": ratio(times, fastest),
                "cost_ms": Spread.of(
                    times[r] - compute[r] for r in times if r in compute
                ),
                **{
                    column: Spread.of(result[column] for result in counted)
                    for column in ("first_step_s", "epoch_cost_s", "memory_mb")
                },
                "choice": measured[0].get("choice") if measured else None,
                "best_stock": best,
                "reason": refused.get(key, ""),
                "error": next((s.error for s in repeats if s.error), ""),
            }
        )
    return results


def ratio(times: Repeats, others: Repeats) -> Spread | None:
    """Divide two rows repeat by repeat, where both were measured."""
    return Spread.of(times[r] / others[r] for r in times if r in others)


def _refused(
    rows: Mapping[str, Row], samples: Sequence[Sample]
) -> dict[tuple[str, int, str], str]:
    """Say why rows do not count, by model, number of devices and name."""
    plain = {
        (s.cell.model, s.cell.repeat): s.result.get("losses", ())
        for s in samples
        if s.cell.row == "plain"
    }
    refused = {}
    for sample in samples:
        cell = sample.cell
        if rows[cell.row].alone or sample.error:
            continue
        reference = plain.get((cell.model, cell.repeat), ())
        if why := difference(sample.result["losses"], reference):
            refused[cell.key] = why
    return refused


def difference(losses: Sequence[float], reference: Sequence[float]) -> str:
    """Say where two curves differ first, or nothing if they agree.

    The whole beginning of the curve has to agree, because a wrong mean over
    replicas shows in the second step.

    Args:
        losses: the loss of each step, as a mean over the global batch.
        reference: the losses to agree with; empty: there are none.

    Example:
        >>> difference([2.3, 1.0], [2.3, 2.1])
        'loss differs from step 2 on (1 against 2.1)'
    """
    if not reference:
        return "plain Keras failed"
    pairs = zip(losses, reference, strict=True)
    for step, (loss, wanted) in enumerate(pairs, 1):
        # Infinity is no loss to agree on, and NaN agrees with nothing.
        close = math.isclose(loss, wanted, rel_tol=TOLERANCE)
        if not (math.isfinite(wanted) and close):
            shown = f"{loss:.7g} against {wanted:.7g}"
            return f"loss differs from step {step} on ({shown})"
    return ""


@dataclass
class Comparison:
    """Rows, models and numbers of replicas, and their measurements."""

    rows: dict[str, Row]
    skipped: dict[str, str]
    models: list[str]
    numbers: dict[Runs, list[int]]
    setting: Setting
    facts: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    complete: bool = False
    titles: dict[str, str] = field(default_factory=dict)

    def run(self, console: Console) -> None:
        """Measure all cells but those of rows that failed, or until Ctrl-C."""
        cells = plan(self.rows, self.models, self.numbers, self.setting.repeats)
        device = self.setting.device.upper()
        console.print(f"{len(cells)} runs on the {device}", style="dim")
        with tempfile.TemporaryDirectory(prefix="keras-towers-") as folder:
            paths = [Path(folder, str(i)) for i in range(len(self.models))]
            stored = dict(zip(self.models, paths, strict=True))
            # On SIGTERM, end exactly as on Ctrl-C.
            ends = handled([signal.SIGTERM], signal.default_int_handler)
            try:
                with ends, Progress(console=console, transient=True) as bar:
                    task = bar.add_task("models", total=len(cells))
                    for model, path in stored.items():
                        stored_model = store(model, path, self.setting)
                        self.titles[model] = stored_model["title"]
                    for done, cell in enumerate(cells):
                        title = f"{cell.title} ({done + 1} of {len(cells)})"
                        bar.update(task, completed=done, description=title)
                        # A row that failed has used up its time limit.
                        if cell.title not in self._failed():
                            row, path = self.rows[cell.row], stored[cell.model]
                            sample = run_cell(row, cell, self.setting, path)
                            self.samples.append(sample)
                self.complete = True
            except KeyboardInterrupt:
                made = f"{len(self.samples)} of {len(cells)} runs made."
                console.print(f"Interrupted: {made}")

    def _failed(self) -> set[str]:
        return {s.cell.title for s in self.samples if s.error}

    @property
    def code(self) -> int:
        """The exit code."""
        if not self.complete:
            return 130
        return int(bool(self._failed()))

    def results(self) -> list[dict[str, Any]]:
        """Return one result per row, model and number of replicas."""
        on_cpu = self.setting.device == "cpu"
        gpus, cores = len(self.facts["gpus"]), self.facts["cores"]
        return summarize(
            self.rows,
            self.samples,
            self.setting.batch,
            cores if on_cpu else gpus,
            self.setting.frameworks,
        )

    def show(self, console: Console, columns: Sequence[str]) -> None:
        """Print a table for each model, and explain all that is in it."""
        results = self.results()
        shown = {
            name: COLUMNS[name]
            for name in columns
            if any(result[name] for result in results)
        }

        def explain(text: str) -> None:
            console.print(text, style="dim", highlight=False, markup=False)

        for model, title in self.titles.items():
            of_model = [r for r in results if r["model"] == model]
            if of_model:
                console.print(self._table(title, of_model, shown))
        for column in shown.values():
            explain(f"{column.title.replace(chr(10), ' ')}: {column.legend}")
        for name in dict.fromkeys(result["row"] for result in results):
            if self.rows[name].note:
                explain(f"{name}: {self.rows[name].note}.")
        for name, why in self.skipped.items():
            explain(f"skipped: {name}: {why}")
        explain(probe.describe_machine(self.facts))
        for result in results:
            kind = "failed" if result["error"] else "does not count"
            if why := result["error"] or result["reason"]:
                where = f"{result['model']}, {result['replicas']} replicas"
                row = f"[red]{kind}:[/] {where}, {result['row']}"
                console.print(row, highlight=False)
                explain(why)

    def _table(
        self,
        title: str,
        results: Sequence[dict[str, Any]],
        columns: Mapping[str, Column],
    ) -> Table:
        """Create a table with a section for each number of replicas."""
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("n", justify="right", no_wrap=True)
        table.add_column("strategy", no_wrap=True)
        for column in columns.values():
            table.add_column(column.title, justify="right")
        before = None
        for result in results:
            count = result["replicas"]
            if before not in (None, count):
                table.add_section()
            cells = (_shown(result[n], column) for n, column in columns.items())
            number = "" if count == before else str(count)
            table.add_row(number, self._name(result), *cells)
            before = count
        return table

    def _name(self, result: dict[str, Any]) -> str:
        name, choice = result["row"], result["choice"]
        text = f"[bold]{name}[/]" if self.rows[name].ours else name
        # Some names already contain it.
        if choice and not name.endswith(choice):
            text += f" ({choice})"
        if name == result["best_stock"]:
            text += " *"
        if result["error"]:
            return f"{text} [red]failed[/]"
        return f"{text} [red]✗[/]" if result["reason"] else text

    def as_json(self) -> str:
        """Return options, machine, measurements and results."""
        settings = {
            **asdict(self.setting),
            "models": self.models,
            "replicas": self.numbers,
            "strategies": list(self.rows),
            "complete": self.complete,
        }
        document = {
            "machine": self.facts,
            "settings": settings,
            "skipped": self.skipped,
            "samples": self.samples,
            "results": self.results(),
        }
        return json.dumps(document, default=asdict, indent=1) + "\n"


def _shown(spread: Spread | None, column: Column) -> str:
    """Format a median and, where repeats are compared, their range."""
    if spread is None:
        return "–"
    median, low, high = (
        column.form.format(value)
        for value in (spread.median, spread.low, spread.high)
    )
    if not column.ranges or spread.low == spread.high:
        return median
    return f"{median}\n[dim]{low}–{high}[/]"
