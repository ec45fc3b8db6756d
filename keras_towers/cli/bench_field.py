"""``keras-towers bench --field``: compare frameworks on the same training."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from keras_towers import user_functions
from keras_towers.bench.field.models import FIELD_MODELS
from keras_towers.bench.field.plan import plan_field
from keras_towers.bench.field.report import Field, show_field
from keras_towers.bench.field.rows import LISTED, ROWS, Runs, split
from keras_towers.bench.field.runner import run_field_cell, store
from keras_towers.bench.machine import machine_facts
from keras_towers.bench.models import MODELS
from keras_towers.bench.plan import Setting, choices, numbers
from keras_towers.cli.bench_parts import (
    check_folder,
    check_gpus,
    end,
    refusing,
    run_all,
)
from keras_towers.errors import TowerError

_MOST_DEVICES = 8
_PICTURES = (".svg", ".png")


@dataclass(frozen=True)
class FieldOptions:
    """The options of ``keras-towers bench --field``, as they are typed.

    Attributes:
        models: names of models; None: ``FIELD_MODELS``, or none with ``model``.
        model: the user's, as ``module:function``.
        devices: numbers of devices; None: as many as there are, but 8 at most,
            and as can share a batch.
        strategies: names of rows; None: all that are installed.
        batches: the number of steps to time.
        batch_size: examples per step, of all replicas together.
        repeats: the number of runs of each row.
        device: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        timeout: the time limit of one run in seconds.
        json_path: where to write all measurements, if anywhere.
        chart: where to draw the results, if anywhere.
    """

    models: str | None
    model: str | None
    devices: str | None
    strategies: str | None
    batches: int
    batch_size: int
    repeats: int
    device: str
    timeout: float
    json_path: Path | None
    chart: Path | None


def run_field(options: FieldOptions) -> None:
    """Measure the field, and show and write the results."""
    with refusing(2):
        models = _models(options)
        rows, skipped = _rows(options.strategies)
        check_folder(options.json_path)
        _check_chart(options.chart)
        text = options.devices
        counts = numbers("--towers", text, 1) if text is not None else []
        if all(ROWS[name].runs is Runs.ONE for name in rows):
            counts = counts or [1]
        if counts == [1]:
            rows, alone = _on_one_device(rows, options.strategies)
            skipped |= alone
    with refusing(1):
        facts = machine_facts(options.timeout)
    with refusing(2):
        device, counts = _devices(options, counts, facts)
        for count in counts:
            if options.batch_size % count:
                raise TowerError(
                    f"{count} devices cannot share --batch-size "
                    f"{options.batch_size} equally"
                )
    setting = Setting(
        device, options.batch_size, options.batches, options.timeout
    )
    settings = {
        "models": models,
        "devices": counts,
        "strategies": rows,
        "batches": options.batches,
        "batch_size": options.batch_size,
        "repeats": options.repeats,
        "device": device,
        "timeout_s": options.timeout,
    }
    console = Console()
    cells = plan_field(models, rows, counts, options.repeats)
    console.print(f"{len(cells)} runs on the {device.upper()}", style="dim")
    with tempfile.TemporaryDirectory(prefix="keras-towers-field-") as folder:
        stored = {m: Path(folder, str(i)) for i, m in enumerate(models)}
        notes = []
        with refusing(2), console.status("storing weights and data"):
            for model, path in stored.items():
                path.mkdir()
                notes.append(store(model, path, setting)["note"])
        run = Field(facts, settings, skipped, list(filter(None, notes)))
        complete = run_all(
            console,
            cells,
            run.samples,
            lambda cell: run_field_cell(cell, stored, setting),
        )
    settings["complete"] = complete
    show_field(console, run)
    if options.json_path:
        run.write(options.json_path)
    if options.chart and run.samples:
        from keras_towers.bench.charts import draw_field

        draw_field(run.document()).savefig(options.chart, dpi=130)
    end(console, complete, len(cells), run.samples)


def _models(options: FieldOptions) -> list[str]:
    """Return the models to train, the user's last."""
    default: list[str] = [] if options.model else list(FIELD_MODELS)
    names = choices("model", options.models, MODELS, default)
    if not options.model:
        return names
    user_functions.split(options.model)
    return [*names, options.model]


def _rows(text: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the rows to measure, and why others are not."""
    able, missing = split(choices("strategy", text, LISTED, LISTED))
    if text is not None and missing:
        name, why = next(iter(missing.items()))
        raise TowerError(f"{name}: {why}")
    return able, missing


def _on_one_device(
    rows: list[str], text: str | None
) -> tuple[list[str], dict[str, str]]:
    """Return the rows that one device is enough for, and why others are not.

    Raises:
        TowerError: one that was chosen needs more.
    """
    more = [name for name in rows if ROWS[name].runs is not Runs.ONE]
    why = "it needs at least 2 devices, and --towers is 1"
    if more and text is not None:
        raise TowerError(f"{more[0]}: {why}")
    return [name for name in rows if name not in more], dict.fromkeys(more, why)


def _devices(
    options: FieldOptions, counts: list[int], facts: dict[str, Any]
) -> tuple[str, list[int]]:
    """Return where to train, and on how many devices beside one."""
    device, gpus = options.device, len(facts["gpus"])
    if device == "auto":
        device = "gpu" if gpus >= max(counts, default=2) else "cpu"
    if not counts:
        there = gpus if device == "gpu" else facts["cores"]
        counts = [_most_that_share(options.batch_size, there)]
    if device == "gpu":
        check_gpus(max(counts), gpus)
    return device, [count for count in counts if count > 1]


def _most_that_share(batch: int, there: int) -> int:
    """Return the largest number of devices that can share a batch equally.

    One core is enough for two devices, which then share it.

    Raises:
        TowerError: not even two can.
    """
    most = max(2, min(there, _MOST_DEVICES))
    for count in range(most, 1, -1):
        if batch % count == 0:
            return count
    raise TowerError(
        f"no number of devices from 2 to {most} can share --batch-size "
        f"{batch} equally"
    )


def _check_chart(path: Path | None) -> None:
    if path is None:
        return
    check_folder(path)
    if path.suffix not in _PICTURES:
        raise TowerError(f"--chart writes .svg or .png, not {path.name!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise TowerError(
            "--chart needs matplotlib: run `pip install 'keras-towers[plots]'`"
        )
