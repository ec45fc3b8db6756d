"""``keras-towers bench``: this package beside plain Keras and TensorFlow."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from keras_towers.cli.bench_models import MODELS
from keras_towers.cli.bench_plans import (
    Amounts,
    Device,
    Plan,
    processes_plan,
    refuse,
    towers_plan,
)
from keras_towers.cli.bench_report import show_report, write_json
from keras_towers.cli.bench_rows import ROWS
from keras_towers.cli.bench_runner import (
    Job,
    Sample,
    WorkerFailed,
    run_jobs,
    run_worker,
)
from keras_towers.cli.bench_strategies import DEFAULT_STRATEGIES, STRATEGIES
from keras_towers.cli.bench_timing import WARM_UP_BATCHES


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
            help=f"Strategies to compare, of {', '.join(STRATEGIES)}; "
            f"{', '.join(DEFAULT_STRATEGIES)} if not given. With --processes "
            f"of {', '.join(ROWS)}; all that are installed if not given.",
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
    if json_path and not json_path.absolute().parent.is_dir():
        refuse(f"there is no folder {json_path.absolute().parent}")
    facts = functools.cache(lambda: _facts(timeout))
    amounts = Amounts(batches, repeats, timeout)
    if processes is None:
        todo = towers_plan(
            models, strategies, modes, towers, device, adoption, amounts, facts
        )
    elif modes or device is Device.GPU:
        refuse("--processes goes without --modes and --device gpu")
    else:
        todo = processes_plan(
            models, strategies, processes, rank_batch, amounts, facts
        )
    console = Console()
    samples: list[Sample] = []
    interrupted = False
    # Ended by a time limit, it has as much to end and to show as by Ctrl-C.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        where = todo.where.upper()
        console.print(f"{len(todo.jobs)} runs on the {where}", style="dim")
        _measure(console, todo, samples)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
    show_report(console, facts(), samples)
    if json_path:
        settings = {
            **todo.settings,
            "batches": batches,
            "repeats": repeats,
            "device": todo.where,
            "timeout_s": timeout,
            "warm_up_batches": WARM_UP_BATCHES,
            "complete": not interrupted,
        }
        write_json(json_path, facts(), settings, samples)
    if interrupted:
        console.print(
            f"Interrupted: {len(samples)} of {len(todo.jobs)} runs made."
        )
        raise typer.Exit(130)
    if any(sample.error for sample in samples):
        raise typer.Exit(1)


def _measure(console: Console, todo: Plan, samples: list[Sample]) -> None:
    """Run all jobs, adding to ``samples`` as they come."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(todo.jobs))

        def announce(job: Job) -> None:
            progress.update(
                task,
                completed=todo.jobs.index(job),
                description=job.title,
            )

        # One by one: an interrupt must leave what came before it.
        for sample in run_jobs(todo.jobs, todo.run, announce):
            samples.append(sample)


def _facts(timeout_s: float) -> dict[str, Any]:
    try:
        return run_worker(["--facts"], timeout_s)
    except WorkerFailed as error:
        typer.echo(f"keras-towers bench: cannot start: {error}", err=True)
        raise typer.Exit(1) from None
