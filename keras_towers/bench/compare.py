"""A comparison of strategies, from the options to the report."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from keras_towers.bench import report
from keras_towers.bench.models import MODELS
from keras_towers.bench.rows import Row, Runs, find
from keras_towers.bench.runner import (
    Sample,
    Setting,
    plan,
    run_cell,
    store,
)
from keras_towers.doctor import probe
from keras_towers.errors import TowerError
from keras_towers.system import handled

_MOST_DEVICES = 8


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

    @classmethod
    def of(
        cls,
        rows: Mapping[str, Row],
        setting: Setting,
        *,
        models: str,
        towers: str | None,
        processes: str | None,
        strategies: str,
    ) -> Comparison:
        """Make a comparison from comma-separated options of a command."""
        sources = _models(models)
        given = {Runs.ONE: "1", Runs.DEVICES: towers, Runs.RANKS: processes}
        numbers = {
            Runs.ONE: [1],
            Runs.DEVICES: _numbers("--towers", towers, 1),
            Runs.RANKS: _numbers("--processes", processes, 2),
        }
        asked = {runs for runs, text in given.items() if text is not None}
        chosen, skipped = _rows(rows, strategies, asked)
        facts = probe.machine_facts(setting.timeout_s)
        gpus, batch = len(facts["gpus"]), setting.batch
        most = max(map(max, filter(None, numbers.values())))
        if setting.device == "auto":
            wanted = max(most, 2) if "auto" in given.values() else most
            device = "gpu" if gpus >= wanted else "cpu"
            setting = replace(setting, device=device)
        on_gpus = setting.device == "gpu"
        there = gpus if on_gpus else facts["cores"]
        for runs, text in given.items():
            if text == "auto":
                # One core is enough for two devices, which then share it.
                count = _shared(batch, max(2, min(there, _MOST_DEVICES)))
                numbers[runs], most = [count], max(most, count)
        if on_gpus and gpus < most:
            raise TowerError(f"{most} GPUs are needed, {gpus} visible")
        for count in (*numbers[Runs.DEVICES], *numbers[Runs.RANKS]):
            if batch % count:
                raise TowerError(
                    f"{count} replicas cannot share --batch-size {batch} "
                    "equally"
                )
        return cls(chosen, skipped, sources, numbers, setting, facts)

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
        return report.summarize(
            self.rows,
            self.samples,
            self.setting.batch,
            cores if on_cpu else gpus,
            self.setting.frameworks,
        )

    def show(self, console: Console, columns: Sequence[str]) -> None:
        """Print a table for each model, explanations, and failures."""
        results, titles = self.results(), self.titles
        report.show(console, self.rows, results, titles, columns)
        for name, why in self.skipped.items():
            report.say(console, f"skipped: {name}: {why}")
        report.say(console, probe.describe_machine(self.facts))

    def document(self) -> dict[str, Any]:
        """Return options, machine and results, as written to JSON."""
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
        return json.loads(json.dumps(document, default=asdict))

    def write(self, path: Path | None) -> None:
        """Write the document to a file, if one is given."""
        if path:
            text = json.dumps(self.document(), indent=1)
            path.write_text(text + "\n", encoding="utf-8")


def _models(text: str) -> list[str]:
    """Split comma-separated names of models, and functions."""
    names = _words(text)
    unknown = [n for n in names if n not in MODELS and ":" not in n]
    if unknown or not names:
        raise TowerError(
            f"--models {text} is not allowed: choose {', '.join(MODELS)}, or a "
            "function of your own as MODULE:FUNCTION"
        )
    return names


def _rows(
    rows: Mapping[str, Row], text: str, asked: Collection[Runs]
) -> tuple[dict[str, Row], dict[str, str]]:
    """Return the rows to measure, and why default ones are not."""
    able: dict[str, Row] = {}
    skipped = {}
    for name in _words(text):
        if name == "default":
            default = {
                n: r for n, r in rows.items() if r.default and r.runs in asked
            }
            able |= {n: r for n, r in default.items() if not r.missing}
            skipped = {n: r.missing for n, r in default.items() if r.missing}
            continue
        able[name] = row = find(rows, name)
        if row.missing:
            raise TowerError(f"{name}: {row.missing}")
        if row.runs not in asked:
            option = "--towers" if row.runs is Runs.DEVICES else "--processes"
            raise TowerError(f"{name} needs {option} N")
    if not able:
        raise TowerError(f"no strategy given; choose {', '.join(rows)}")
    # Those first that figures of others are relative to.
    wanted = {row.plain for row in able.values()}
    wanted |= {r.compute for r in able.values() if r.runs is Runs.RANKS}
    return {n: r for n, r in rows.items() if n in wanted} | able, skipped


def _words(text: str) -> list[str]:
    """Split comma-separated words."""
    words = (word.strip() for word in text.split(","))
    return list(dict.fromkeys(filter(None, words)))


def _numbers(option: str, text: str | None, least: int) -> list[int]:
    """Parse comma-separated whole numbers from ``least``."""
    if text in (None, "auto"):
        return []
    try:
        counts = sorted(map(int, _words(text or "")))
    except ValueError:
        counts = []
    if not counts or counts[0] < least:
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
