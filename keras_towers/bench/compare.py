"""A comparison of strategies, from the options to the report."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from keras_towers.bench import report
from keras_towers.bench.machine import describe_machine, machine_facts
from keras_towers.bench.models import MODELS
from keras_towers.bench.rows import Row, Runs, find, with_references
from keras_towers.bench.runner import (
    Cell,
    Sample,
    Setting,
    plan,
    run_cell,
    store,
)
from keras_towers.errors import TowerError
from keras_towers.system import handled

_MOST_DEVICES = 8


@dataclass
class Comparison:
    """Rows, models and numbers of replicas, and what was measured of them.

    Attributes:
        rows: those to measure, by name.
        skipped: why others are not measured, by name.
        models: their sources.
        numbers: of replicas, by where they are.
        repeats: the number of runs of each row.
        setting: what all runs have in common.
        facts: about the machine.
        samples: all that was measured so far.
        complete: whether all was measured.
        titles: of the models, by source.
        notes: on the models, for the reader of the tables.
    """

    rows: dict[str, Row]
    skipped: dict[str, str]
    models: list[str]
    numbers: dict[Runs, list[int]]
    repeats: int
    setting: Setting
    facts: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    complete: bool = False
    titles: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        rows: Mapping[str, Row],
        *,
        models: str,
        towers: str | None,
        processes: str | None,
        strategies: str,
        repeats: int,
        device: str,
        batch_size: int,
        timeout: float,
        json_path: Path | None,
        **setting: Any,
    ) -> Comparison:
        """Check the options of a command and look at the machine.

        Args:
            rows: all rows by name.
            models: comma-separated, as all texts.
            towers: numbers of devices, or ``"auto"``; None: none.
            processes: likewise.
            strategies: names of rows, or ``"default"``.
            repeats: the number of runs of each row.
            device: ``"auto"``, ``"cpu"`` or ``"gpu"``.
            batch_size: examples of a global batch.
            timeout: seconds for one run.
            json_path: a file that is written later, if any.
            setting: more of ``Setting``.
        """
        check_file(json_path)
        sources = _models(models)
        given = {Runs.ONE: "1", Runs.DEVICES: towers, Runs.RANKS: processes}
        numbers = {
            Runs.ONE: [1],
            Runs.DEVICES: _numbers("--towers", towers, 1),
            Runs.RANKS: _numbers("--processes", processes, 2),
        }
        asked = {runs for runs, text in given.items() if text is not None}
        names, skipped = _names(rows, strategies, asked)
        facts = machine_facts(timeout)
        gpus = len(facts["gpus"])
        most = max(map(max, filter(None, numbers.values())))
        if device == "auto":
            wanted = max(most, 2) if "auto" in given.values() else most
            device = "gpu" if gpus >= wanted else "cpu"
        there = gpus if device == "gpu" else facts["cores"]
        for runs, text in given.items():
            if text == "auto":
                # One core is enough for two devices, which then share it.
                count = _shared(batch_size, max(2, min(there, _MOST_DEVICES)))
                numbers[runs], most = [count], max(most, count)
        if device == "gpu" and gpus < most:
            raise TowerError(f"{most} GPUs are needed, {gpus} visible")
        for count in (*numbers[Runs.DEVICES], *numbers[Runs.RANKS]):
            if batch_size % count:
                raise TowerError(
                    f"{count} replicas cannot share --batch-size {batch_size} "
                    "equally"
                )
        shared = Setting(
            device=device, batch=batch_size, timeout_s=timeout, **setting
        )
        chosen = {name: find(rows, name) for name in names}
        return cls(chosen, skipped, sources, numbers, repeats, shared, facts)

    def run(self, console: Console) -> None:
        """Measure all cells but those of rows that failed, or until Ctrl-C."""
        cells = plan(self.rows, self.models, self.numbers, self.repeats)
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
                        told = store(model, path, self.setting)
                        self.titles[model] = told["title"]
                        self.notes += filter(None, [told["note"]])
                    for done, cell in enumerate(cells):
                        title = f"{cell.title} ({done + 1} of {len(cells)})"
                        bar.update(task, completed=done, description=title)
                        if not self._failed(cell):
                            self._measure(cell, stored[cell.model])
                self.complete = True
            except KeyboardInterrupt:
                made = f"{len(self.samples)} of {len(cells)} runs made."
                console.print(f"Interrupted: {made}")

    def _failed(self, cell: Cell) -> bool:
        """Whether an earlier repeat failed, and used up its time limit."""
        return any(s.error and s.cell.title == cell.title for s in self.samples)

    def _measure(self, cell: Cell, stored: Path) -> None:
        row = self.rows[cell.row]
        self.samples.append(run_cell(row, cell, self.setting, stored))

    @property
    def code(self) -> int:
        """The exit code."""
        if not self.complete:
            return 130
        return int(any(sample.error for sample in self.samples))

    def results(self) -> list[dict[str, Any]]:
        """Return one result per row, model and number of replicas."""
        return report.summarize(self.rows, self.samples)

    def show(
        self,
        console: Console,
        columns: Mapping[str, report.Column] = report.COLUMNS,
    ) -> None:
        """Print a table for each model, explanations, and failures."""
        results = self.results()
        report.show_results(console, self.rows, results, self.titles, columns)
        skipped = [f"skipped: {n}: {why}" for n, why in self.skipped.items()]
        where = describe_machine(self.facts)
        for line in (*self.notes, *skipped, where):
            report.say(console, line)
        report.show_failures(console, self.samples)

    def document(self) -> dict[str, Any]:
        """Return all that is known, as written to JSON."""
        settings = {
            **asdict(self.setting),
            "models": self.models,
            "replicas": self.numbers,
            "strategies": list(self.rows),
            "repeats": self.repeats,
            "complete": self.complete,
        }
        document = {
            "machine": self.facts,
            "settings": settings,
            "skipped": self.skipped,
            "notes": self.notes,
            "samples": self.samples,
            "results": self.results(),
        }
        return json.loads(json.dumps(document, default=asdict))

    def write(self, path: Path | None) -> None:
        """Write the document, if to anywhere."""
        if path:
            text = json.dumps(self.document(), indent=1)
            path.write_text(text + "\n", encoding="utf-8")


def check_file(path: Path | None) -> None:
    """Check that a file can be written, before there is anything to write."""
    if path and path.is_dir():
        raise TowerError(f"{path} is a folder; name a file in it")
    if path and not path.absolute().parent.is_dir():
        raise TowerError(f"there is no folder {path.absolute().parent}")


def _models(text: str) -> list[str]:
    """Split comma-separated names of models, and functions."""
    names = _words(text)
    known = ", ".join(MODELS)
    if not names:
        raise TowerError(f"no model given; choose {known}")
    for name in names:
        if name not in MODELS and ":" not in name:
            raise TowerError(
                f"unknown model '{name}'; choose {known}, or a function of "
                "your own as MODULE:FUNCTION"
            )
    return names


def _names(
    rows: Mapping[str, Row], text: str, asked: Collection[Runs]
) -> tuple[list[str], dict[str, str]]:
    """Return the rows to measure, and why default ones are not."""
    able: list[str] = []
    skipped = {}
    for name in _words(text):
        if name == "default":
            default = [
                r for r in rows.values() if r.default and r.runs in asked
            ]
            able += [row.name for row in default if not row.missing]
            skipped = {r.name: r.missing for r in default if r.missing}
            continue
        row = find(rows, name)
        if row.missing:
            raise TowerError(f"{name}: {row.missing}")
        if row.runs not in asked:
            option = "--towers" if row.runs is Runs.DEVICES else "--processes"
            raise TowerError(f"{name} needs {option} N")
        able.append(name)
    if not able:
        raise TowerError(f"no strategy given; choose {', '.join(rows)}")
    return with_references(rows, able), skipped


def _words(text: str) -> list[str]:
    """Split comma-separated words."""
    words = (word.strip() for word in text.split(","))
    return list(dict.fromkeys(filter(None, words)))


def _numbers(option: str, text: str | None, least: int) -> list[int]:
    """Parse comma-separated whole numbers from ``least``."""
    if text in (None, "auto"):
        return []
    words = _words(text or "")
    counts = sorted({int(word) for word in words if word.isdecimal()})
    if not counts or counts[0] < least or not all(map(str.isdecimal, words)):
        raise TowerError(
            f"{option} takes whole numbers from {least}, not '{text}'"
        )
    return counts


def _shared(batch: int, most: int) -> int:
    """Return the largest number of devices that can share a batch equally."""
    for count in range(most, 1, -1):
        if batch % count == 0:
            return count
    raise TowerError(
        f"no number of devices from 2 to {most} can share --batch-size "
        f"{batch} equally"
    )
