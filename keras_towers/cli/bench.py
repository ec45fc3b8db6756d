"""``keras-towers bench``: compare with plain Keras and TensorFlow."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from keras_towers.bench.compare import Comparison
from keras_towers.bench.models import MODELS
from keras_towers.bench.rows import ROWS, Row, Runs, find
from keras_towers.bench.runner import FIRST_STEPS, Setting
from keras_towers.doctor import probe
from keras_towers.errors import TowerError
from keras_towers.system import writable_file

_MOST_DEVICES = 8


class Device(StrEnum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


Models = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Your own model as MODULE:FUNCTION, which returns it compiled, "
        "alone or as (model, x, y): without data, random examples are made. Or "
        f"some of {', '.join(MODELS)}.",
    ),
]
Towers = Annotated[
    str | None,
    typer.Option(
        metavar="NUMBERS",
        help="Numbers of towers of one process. Default: as many as there are "
        "GPUs or cores and as can share a batch equally, but 8 at most; none "
        "with --processes alone.",
    ),
]
Strategies = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help=f"Rows to compare, such as {', '.join(ROWS)}; default: those that "
        "are installed. Options of a strategy follow its name: "
        "default,tower:mode=cpu,horovod:compression=fp16.",
    ),
]
Repeats = Annotated[int, typer.Option(min=1, help="Runs per row.")]
Steps = Annotated[
    int,
    typer.Option(
        min=1,
        help=f"Steps to time in a run, after {FIRST_STEPS} warm-up steps.",
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        min=1, help="Examples per step, however many replicas share them."
    ),
]
On = Annotated[
    Device, typer.Option(help="auto uses GPUs if there are enough of them.")
]
Timeout = Annotated[
    float, typer.Option(min=1, help="Time limit of one run in seconds.")
]
_COLUMNS = (
    "step_ms",
    "to_plain",
    "to_stock",
    "cost_ms",
    "first_step_s",
    "epoch_cost_s",
    "memory_mb",
)
JsonPath = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="PATH",
        help="Also write all measurements to this file.",
    ),
]


def bench(
    models: Models = "large",
    towers: Towers = None,
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Numbers of processes, for strategies over several: one core "
            "or GPU each.",
        ),
    ] = None,
    strategies: Strategies = "default",
    steps: Steps = 60,
    batch_size: BatchSize = 64,
    repeats: Repeats = 3,
    device: On = Device.AUTO,
    timeout: Timeout = 300,
    json_path: JsonPath = None,
) -> None:
    """Compare the speed of strategies on a model.

    Each run is a separate process and takes 5 to 15 seconds on a CPU. Ctrl-C
    shows the results so far.
    """
    if towers is None and processes is None:
        towers = "auto"
    compare(
        ROWS,
        Setting(device, batch_size, steps, timeout, repeats),
        _COLUMNS,
        json_path,
        models=models,
        towers=towers,
        processes=processes,
        strategies=strategies,
    )


def compare(
    rows: Mapping[str, Row],
    setting: Setting,
    columns: Sequence[str],
    json_path: Path | None,
    *,
    models: str,
    towers: str | None,
    processes: str | None,
    strategies: str,
) -> NoReturn:
    """Measure rows, show the results, and exit.

    Args:
        rows: all rows, by name.
        setting: the options of all runs.
        columns: of the table, by name.
        json_path: a file to write all measurements to.
        models: comma-separated names.
        towers: comma-separated numbers, or "auto".
        processes: likewise.
        strategies: comma-separated names.
    """
    if json_path:
        writable_file(json_path, "bench")
    sources = _models(models)
    texts = {Runs.ONE: "1", Runs.DEVICES: towers, Runs.RANKS: processes}
    numbers = {
        Runs.ONE: [1],
        Runs.DEVICES: _numbers("--towers", towers, 1),
        Runs.RANKS: _numbers("--processes", processes, 2),
    }
    places = {runs for runs, text in texts.items() if text is not None}
    chosen, skipped = _rows(rows, strategies, places)
    facts = probe.machine_facts(setting.timeout_s)
    gpus, batch = len(facts["gpus"]), setting.batch
    most = max(map(max, filter(None, numbers.values())))
    if setting.device == "auto":
        wanted = max(most, 2) if "auto" in texts.values() else most
        device = "gpu" if gpus >= wanted else "cpu"
        setting = replace(setting, device=device)
    on_gpus = setting.device == "gpu"
    there = gpus if on_gpus else facts["cores"]
    for runs, text in texts.items():
        if text == "auto":
            # One core is enough for two devices, which then share it.
            count = _shared(batch, max(2, min(there, _MOST_DEVICES)))
            numbers[runs], most = [count], max(most, count)
    if on_gpus and gpus < most:
        raise TowerError(f"{most} GPUs are needed, {gpus} visible")
    for count in (*numbers[Runs.DEVICES], *numbers[Runs.RANKS]):
        if batch % count:
            raise TowerError(
                f"{count} replicas cannot share --batch-size {batch} equally"
            )
    console = Console()
    comparison = Comparison(chosen, skipped, sources, numbers, setting, facts)
    comparison.run(console)
    comparison.show(console, columns)
    if json_path:
        json_path.write_text(comparison.as_json(), encoding="utf-8")
    raise typer.Exit(comparison.code)


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
    rows: Mapping[str, Row], text: str, places: Collection[Runs]
) -> tuple[dict[str, Row], dict[str, str]]:
    """Return the rows to measure, and why default ones are not."""
    able: dict[str, Row] = {}
    skipped = {}
    for name in _words(text):
        if name == "default":
            default = {
                n: r for n, r in rows.items() if r.default and r.runs in places
            }
            able |= {n: r for n, r in default.items() if not r.missing}
            skipped = {n: r.missing for n, r in default.items() if r.missing}
            continue
        able[name] = row = find(rows, name)
        if row.missing:
            raise TowerError(f"{name}: {row.missing}")
        if row.runs not in places:
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
