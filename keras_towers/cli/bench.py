"""``keras-towers bench``: compare with plain Keras and TensorFlow."""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from keras_towers.bench.field.curves import STEPS
from keras_towers.bench.field.models import FIELD_MODELS
from keras_towers.bench.field.rows import LISTED
from keras_towers.bench.machine import cpu_threads, machine_facts
from keras_towers.bench.measure import WARM_UP_BATCHES
from keras_towers.bench.models import MODELS
from keras_towers.bench.plan import Setting, choices, numbers, plan_cells
from keras_towers.bench.report import show_report, write_json
from keras_towers.bench.rows import MODES, PROCESSES, TOWERS
from keras_towers.bench.runner import Sample, run_cell
from keras_towers.cli.bench_field import FieldOptions, run_field
from keras_towers.cli.bench_parts import (
    check_folder,
    check_gpus,
    check_together,
    end,
    refusing,
    run_all,
)
from keras_towers.errors import TowerError

_TOWERS = "1,2,4,8"
_RANK_BATCH = 32
_REPEATS, _FIELD_REPEATS = 3, 1


class Device(StrEnum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


def bench(
    models: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Models to train, from {', '.join(MODELS)}. Default: "
            f"{', '.join(TOWERS.models)}; with --processes, large; with "
            f"--field, {', '.join(FIELD_MODELS)}.",
        ),
    ] = None,
    towers: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Numbers of towers. Default: 1,2,4,8; with --field, where "
            "they are numbers of devices, as many as there are GPUs or cores "
            "and as can share a batch equally, but 8 at most.",
        ),
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Instead compare ways to train in this many processes on "
            "the CPU, one core each: Horovod, HorovodStrategy and others.",
        ),
    ] = None,
    field: Annotated[
        bool,
        typer.Option(
            "--field",
            help="Instead compare frameworks on the same model, weights and "
            "data: TensorFlow, Horovod, PyTorch and JAX, where installed. A "
            "row counts only if its losses are those of one device.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="With --field: train your own model, which the function "
            "returns compiled, alone or as (model, x, y). Without data, "
            "random examples are made.",
        ),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="With --field: also draw the results, as .svg or .png.",
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Strategies to compare, from {', '.join(TOWERS.rows)} "
            f"(default: {', '.join(TOWERS.default_rows())}); with --processes, "
            f"from {', '.join(PROCESSES.rows)} (default: "
            f"{', '.join(PROCESSES.default_rows())}); with --field, from "
            f"{', '.join(LISTED)} (default: all that are installed).",
        ),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Modes of TowerStrategy to compare as well; --modes cpu adds "
            "the strategy towers-cpu.",
        ),
    ] = "",
    batches: Annotated[
        int,
        typer.Option(
            min=1,
            help=f"Steps to time in a run, after {WARM_UP_BATCHES} warm-up "
            f"steps ({STEPS} with --field).",
        ),
    ] = 60,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, help="Examples per step, however many towers share them."
        ),
    ] = 64,
    rank_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Examples per step and process, with --processes. "
            f"Default: {_RANK_BATCH}.",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Runs per row. Default: {_REPEATS}; with --field, "
            f"{_FIELD_REPEATS}.",
        ),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="auto uses GPUs if there are enough of them.")
    ] = Device.AUTO,
    adoption: Annotated[
        bool | None,
        typer.Option(
            "--adoption/--no-adoption",
            help="Also time the adoption of a 100 MB model. Default: yes; "
            "not with --field.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Time limit of one run in seconds.")
    ] = 300,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="PATH",
            help="Also write all measurements to this file.",
        ),
    ] = None,
) -> None:
    """Compare towers with plain Keras and TensorFlow's MirroredStrategy.

    Each run is a separate process and takes 5 to 15 seconds on a CPU; the
    default plan takes about an hour, that of --field (51 runs where all is
    installed) about a quarter of one. Ctrl-C shows the results so far.
    """
    if field:
        with refusing(2):
            unfit = {
                "--processes": processes,
                "--modes": modes,
                "--rank-batch": rank_batch,
                "--adoption or --no-adoption": adoption is not None,
            }
            check_together("--field", unfit)
        run_field(
            FieldOptions(
                models=models,
                model=model,
                devices=towers,
                strategies=strategies,
                batches=batches,
                batch_size=batch_size,
                repeats=repeats or _FIELD_REPEATS,
                device=device.value,
                timeout=timeout,
                json_path=json_path,
                chart=chart,
            )
        )
        return
    suite, wanted, batch = TOWERS, towers or _TOWERS, batch_size
    if processes is not None:
        suite, wanted = PROCESSES, processes
        batch = rank_batch or _RANK_BATCH
    repeats = repeats or _REPEATS
    with refusing(2):
        if suite is TOWERS:
            check_together("--processes", {"--rank-batch": rank_batch}, False)
        check_together("--field", {"--model": model, "--chart": chart}, False)
        check_folder(json_path)
        if suite is PROCESSES and (modes or device is Device.GPU):
            raise TowerError(
                "--processes cannot be combined with --modes or --device gpu"
            )
        names = choices("model", models, MODELS, list(suite.models))
        rows = choices("strategy", strategies, suite.rows, suite.default_rows())
        rows += [f"towers-{mode}" for mode in choices("mode", modes, MODES, [])]
        counts = numbers(f"--{suite.replicas}", wanted, suite.least)
        if suite is PROCESSES and importlib.util.find_spec("horovod") is None:
            # The launcher needs its rendezvous for every row.
            raise TowerError(
                "Horovod is not installed: run `keras-towers install horovod`"
            )
    with refusing(1):
        facts = machine_facts(timeout)
    gpus = 0 if suite is PROCESSES else len(facts["gpus"])
    if device is Device.AUTO:
        device = Device.GPU if gpus >= max(counts) else Device.CPU
    with refusing(2):
        if device is Device.GPU:
            check_gpus(max(counts), gpus)
    setting = Setting(device.value, batch, batches, timeout)
    timed = adoption is not False
    cells = plan_cells(suite, names, rows, counts, repeats, timed)
    console = Console()
    console.print(f"{len(cells)} runs on the {device.upper()}", style="dim")
    samples: list[Sample] = []
    complete = run_all(
        console, cells, samples, lambda cell: run_cell(cell, setting)
    )
    show_report(console, facts, samples)
    if json_path:
        settings: dict[str, Any] = {
            "models": names,
            suite.replicas: counts,
            "strategies": rows,
            "batches": batches,
            "repeats": repeats,
            "device": device.value,
            "timeout_s": timeout,
            "warm_up_batches": WARM_UP_BATCHES,
            "complete": complete,
        }
        if suite is PROCESSES:
            cores = {n: min(n, facts["cores"]) for n in counts}
            settings |= {"rank_batch": batch, "cores": cores}
        else:
            threads = {n: cpu_threads(n) for n in counts}
            settings |= {"batch_size": batch, "cpu_threads": threads}
        write_json(json_path, facts, settings, samples)
    end(console, complete, len(cells), samples)
