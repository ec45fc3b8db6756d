"""``keras-towers bench``: compare with plain Keras and TensorFlow."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer
from rich.console import Console

from keras_towers.bench.models import MODELS
from keras_towers.bench.report import explain, print_tables, summarize
from keras_towers.bench.rows import Row, Runs, find_row
from keras_towers.bench.runner import Setting, measure_all, plan_cells
from keras_towers.doctor import probe
from keras_towers.errors import TowerError
from keras_towers.system import check_writable


class Device(StrEnum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


_SHOWN_COLUMNS = (
    "step_ms",
    "to_plain",
    "to_stock",
    "cost_ms",
    "first_step_s",
    "epoch_cost_s",
    "memory_mb",
)


Names: TypeAlias = Annotated[str, typer.Option(metavar="NAMES")]
Numbers: TypeAlias = Annotated[str | None, typer.Option(metavar="NUMBERS")]


def bench(
    models: Names = "large",
    towers: Numbers = None,
    processes: Numbers = None,
    strategies: Names = "default",
    steps: Annotated[int, typer.Option(min=1)] = 60,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    device: Device = Device.AUTO,
    timeout: Annotated[float, typer.Option(min=1)] = 300,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH")
    ] = None,
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
        device: auto uses GPUs if there are enough of them.
        timeout: Time limit of one run in seconds.
        json_path: Also write all measurements to this file.
    """
    if towers is None and processes is None:
        towers = "auto"
    compare(
        Setting(device, batch_size, steps, timeout),
        _SHOWN_COLUMNS,
        json_path,
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
        models: comma-separated names.
        towers: comma-separated numbers, or "auto".
        processes: comma-separated numbers, or "auto".
        strategies: comma-separated names.
        repeats: the number of runs per row.
    """
    if json_path:
        check_writable(json_path, "bench")
    sources, rows = _parse_models(models), pkgutil.resolve_name(setting.rows)
    numbers = {
        Runs.ONE: [1],
        Runs.DEVICES: _parse_numbers("--towers", towers, 1),
        Runs.RANKS: _parse_numbers("--processes", processes, 2),
    }
    kinds = [runs for runs, counts in numbers.items() if counts]
    chosen, skipped = _choose_rows(rows, strategies, kinds)
    facts = probe.machine_facts(setting.timeout_s)
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
        explain(console, f"skipped: {name}: {why}")
    explain(console, probe.describe_machine(facts))
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
    if setting.device == "auto":
        most = max(n or 2 for counts in numbers.values() for n in counts)
        setting = replace(setting, device="gpu" if gpus >= most else "cpu")
    available = gpus if setting.device == "gpu" else facts["cores"]
    # Two towers may share a core.
    fitting = next(n for n in (8, 4, 2) if n <= max(2, available))
    for counts in numbers.values():
        counts[:] = [count or fitting for count in counts]
    everything = [count for counts in numbers.values() for count in counts]
    if setting.device == "gpu" and gpus < max(everything):
        raise TowerError(f"{max(everything)} GPUs are needed, {gpus} visible")
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
