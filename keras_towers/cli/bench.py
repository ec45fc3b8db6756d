"""``keras-towers bench``: compare with plain Keras and TensorFlow."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from keras_towers.bench.machine import cpu_threads, machine_facts
from keras_towers.bench.measure import WARM_UP_BATCHES
from keras_towers.bench.models import MODELS
from keras_towers.bench.plan import Cell, Setting, choices, numbers, plan_cells
from keras_towers.bench.report import show_report, write_json
from keras_towers.bench.rows import MODES, PROCESSES, TOWERS
from keras_towers.bench.runner import Sample, failed_before, run_cell
from keras_towers.errors import CompatibilityError, TowerError

# Examples per step of a process, however many towers it has.
_BATCH_SIZE = 64


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
            help=f"Models to train, from {', '.join(MODELS)}. Default: all; "
            "with --processes, large.",
        ),
    ] = None,
    towers: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Numbers of towers.")
    ] = "1,2,4,8",
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Instead compare ways to train in this many processes on "
            "the CPU, one core each: Horovod, HorovodStrategy and others.",
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Strategies to compare, from {', '.join(TOWERS.rows)}. "
            f"Default: {', '.join(TOWERS.default_rows())}. With --processes "
            f"from {', '.join(PROCESSES.rows)}. Default: all that are "
            "installed.",
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
            min=1, help="Steps to time in a run, after 10 warm-up steps."
        ),
    ] = 60,
    rank_batch: Annotated[
        int,
        typer.Option(
            min=1, help="Examples per step and process, with --processes."
        ),
    ] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per row.")] = 3,
    device: Annotated[
        Device, typer.Option(help="auto uses GPUs if there are enough of them.")
    ] = Device.AUTO,
    adoption: Annotated[
        bool, typer.Option(help="Also time the adoption of a 100 MB model.")
    ] = True,
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
    default plan takes about an hour. Ctrl-C shows the results so far.
    """
    suite, wanted, batch = TOWERS, towers, _BATCH_SIZE
    if processes is not None:
        suite, wanted, batch = PROCESSES, processes, rank_batch
    with _refusing(2):
        if json_path and not json_path.absolute().parent.is_dir():
            raise TowerError(
                f"there is no folder {json_path.absolute().parent}"
            )
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
    with _refusing(1):
        facts = machine_facts(timeout)
    gpus = 0 if suite is PROCESSES else len(facts["gpus"])
    if device is Device.AUTO:
        device = Device.GPU if gpus >= max(counts) else Device.CPU
    with _refusing(2):
        if device is Device.GPU and gpus < max(counts):
            raise TowerError(
                f"{max(counts)} GPUs are needed for --towers, {gpus} visible"
            )
    setting = Setting(device.value, batch, batches, timeout)
    cells = plan_cells(suite, names, rows, counts, repeats, adoption)
    console = Console()
    console.print(f"{len(cells)} runs on the {device.upper()}", style="dim")
    samples: list[Sample] = []
    complete = _measure(console, cells, setting, samples)
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
    if not complete:
        console.print(f"Interrupted: {len(samples)} of {len(cells)} runs made.")
        raise typer.Exit(130)
    if any(sample.error for sample in samples):
        raise typer.Exit(1)


def _measure(
    console: Console, cells: list[Cell], setting: Setting, samples: list[Sample]
) -> bool:
    """Run all cells, appending to ``samples``; False if interrupted."""
    # On SIGTERM, clean up and show results exactly as on Ctrl-C.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("starting", total=len(cells))
            for done, cell in enumerate(cells):
                title = f"{cell.title} ({done + 1} of {len(cells)})"
                bar.update(task, completed=done, description=title)
                if not failed_before(cell, samples):
                    samples.append(run_cell(cell, setting))
    except KeyboardInterrupt:
        return False
    finally:
        signal.signal(signal.SIGTERM, before)
    return True


@contextlib.contextmanager
def _refusing(code: int) -> Iterator[None]:
    """Turn errors into one line on stderr and this exit code."""
    try:
        yield
    except (CompatibilityError, TowerError) as error:
        typer.echo(f"keras-towers bench: {error}", err=True)
        raise typer.Exit(code) from None
