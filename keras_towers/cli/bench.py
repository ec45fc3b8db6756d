"""``keras-towers bench``: this package beside plain Keras and TensorFlow."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from keras_towers.cli.bench_devices import cpu_threads
from keras_towers.cli.bench_models import MODELS
from keras_towers.cli.bench_report import show_report, write_json
from keras_towers.cli.bench_runner import (
    Job,
    Sample,
    WorkerFailed,
    plan,
    run_jobs,
    run_worker,
)
from keras_towers.cli.bench_strategies import (
    DEFAULT_STRATEGIES,
    MODES,
    STRATEGIES,
)
from keras_towers.cli.bench_worker import BATCH_SIZE, WARM_UP_BATCHES


class Device(StrEnum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


def bench(
    models: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help=f"Models to train, of {', '.join(MODELS)}."
        ),
    ] = ",".join(MODELS),
    towers: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Numbers of towers.")
    ] = "1,2,4,8",
    strategies: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help=f"Strategies to compare, of {', '.join(STRATEGIES)}.",
        ),
    ] = ",".join(DEFAULT_STRATEGIES),
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
    whole default plan takes about half an hour. Ctrl-C shows what was measured
    so far.
    """
    model_names = _choices("model", models, tuple(MODELS))
    names = _choices("strategy", strategies, STRATEGIES)
    names += [f"towers-{m}" for m in _choices("mode", modes, MODES, least=0)]
    counts = _tower_counts(towers)
    if json_path and not json_path.absolute().parent.is_dir():
        _refuse(f"there is no folder {json_path.absolute().parent}")
    console = Console()
    facts = _facts(timeout)
    where = _choose_device(device, counts, len(facts["gpus"]))
    jobs = plan(model_names, names, counts, repeats, adoption)
    samples: list[Sample] = []
    interrupted = False
    try:
        console.print(f"{len(jobs)} runs on the {where.upper()}", style="dim")
        _measure(console, jobs, samples, where, batches, timeout)
    except KeyboardInterrupt:
        interrupted = True
    show_report(console, facts, samples)
    if json_path:
        settings = {
            "models": model_names,
            "towers": counts,
            "strategies": names,
            "batches": batches,
            "repeats": repeats,
            "device": where,
            "timeout_s": timeout,
            "batch_size": BATCH_SIZE,
            "warm_up_batches": WARM_UP_BATCHES,
            "cpu_threads": {n: cpu_threads(n) for n in counts},
            "complete": not interrupted,
        }
        write_json(json_path, facts, settings, samples)
    if interrupted:
        console.print(f"Interrupted: {len(samples)} of {len(jobs)} runs made.")
        raise typer.Exit(130)
    if any(sample.error for sample in samples):
        raise typer.Exit(1)


def _measure(
    console: Console,
    jobs: list[Job],
    samples: list[Sample],
    device: str,
    batches: int,
    timeout_s: float,
) -> None:
    """Run all jobs, adding to ``samples`` as they come."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(jobs))

        def announce(job: Job) -> None:
            progress.update(
                task,
                completed=jobs.index(job),
                description=job.title,
            )

        # One by one: an interrupt must leave what came before it.
        for sample in run_jobs(jobs, device, batches, timeout_s, announce):
            samples.append(sample)


def _facts(timeout_s: float) -> dict[str, Any]:
    try:
        return run_worker(["--facts"], timeout_s)
    except WorkerFailed as error:
        typer.echo(f"keras-towers bench: cannot start: {error}", err=True)
        raise typer.Exit(1) from None


def _choose_device(device: Device, towers: list[int], gpus: int) -> str:
    if device is Device.AUTO:
        return "gpu" if gpus >= max(towers) else "cpu"
    if device is Device.GPU and gpus < max(towers):
        _refuse(f"{max(towers)} GPUs are needed for --towers, {gpus} visible")
    return device.value


def _choices(
    what: str, text: str, allowed: tuple[str, ...], least: int = 1
) -> list[str]:
    """Split a list given by commas, or end with one line that says why not."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < least:
        _refuse(f"no {what} given; choose {', '.join(allowed)}")
    for name in names:
        if name not in allowed:
            _refuse(f"unknown {what} '{name}'; choose {', '.join(allowed)}")
    return list(dict.fromkeys(names))


def _tower_counts(text: str) -> list[int]:
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        _refuse(f"--towers takes whole numbers from 1, not '{text}'")
    return counts


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"keras-towers bench: {reason}", err=True)
    raise typer.Exit(2)
