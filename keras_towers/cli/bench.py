"""``keras-towers bench``: this package beside plain Keras and TensorFlow."""

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
from keras_towers.errors import TowerError

# Examples of a step of one process, whatever the number of its towers.
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
            help=f"Models to train, of {', '.join(MODELS)}. All of them if not "
            "given; large with --processes.",
        ),
    ] = None,
    towers: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Numbers of towers.")
    ] = "1,2,4,8",
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Compare ways to train in so many processes on the CPU "
            "instead, with one core each: Horovod, HorovodStrategy and others.",
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Strategies to compare, of {', '.join(TOWERS.rows)}; "
            f"{', '.join(TOWERS.default_rows())} if not given. With "
            f"--processes of {', '.join(PROCESSES.rows)}; all that are "
            "installed if not given.",
        ),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Modes of TowerStrategy to compare as well: --modes cpu is "
            "short for a strategy towers-cpu.",
        ),
    ] = "",
    batches: Annotated[
        int, typer.Option(min=1, help="Steps timed in a run, after 10 more.")
    ] = 60,
    rank_batch: Annotated[
        int,
        typer.Option(
            min=1, help="Examples a step of each process, with --processes."
        ),
    ] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every row.")] = 3,
    device: Annotated[
        Device, typer.Option(help="auto takes GPUs where there are enough.")
    ] = Device.AUTO,
    adoption: Annotated[
        bool, typer.Option(help="Time taking over a 100 MB model too.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that one run may take.")
    ] = 300,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="PATH",
            help="Also write everything measured to this file.",
        ),
    ] = None,
) -> None:
    """Time towers beside plain Keras and TensorFlow's MirroredStrategy.

    Every run is a process of its own and takes 5 to 15 seconds on a CPU; the
    whole default plan takes about an hour. Ctrl-C shows what was measured
    so far.
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
                "--processes goes without --modes and --device gpu"
            )
        names = choices("model", models, MODELS, list(suite.models))
        rows = choices("strategy", strategies, suite.rows, suite.default_rows())
        rows += [f"towers-{mode}" for mode in choices("mode", modes, MODES, [])]
        counts = numbers(f"--{suite.replicas}", wanted, suite.least)
        if suite is PROCESSES and importlib.util.find_spec("horovod") is None:
            # Its rendezvous is what the launcher starts all rows with.
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
    """Run all cells, adding to ``samples`` as they come, unless interrupted."""
    # Ended by a time limit, it has as much to end and to show as by Ctrl-C.
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
    """End the command with one line and this exit code."""
    try:
        yield
    except TowerError as error:
        typer.echo(f"keras-towers bench: {error}", err=True)
        raise typer.Exit(code) from None
