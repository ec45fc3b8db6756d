"""``keras-towers bench``: compare with plain Keras and TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from keras_towers.bench.compare import Comparison
from keras_towers.bench.models import MODELS
from keras_towers.bench.rows import ROWS, Row
from keras_towers.bench.runner import FIRST_STEPS, Setting
from keras_towers.system import writable_file


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
    comparison = compare(
        ROWS,
        Setting(device, batch_size, steps, timeout, repeats),
        _COLUMNS,
        json_path,
        models=models,
        towers=towers,
        processes=processes,
        strategies=strategies,
    )
    raise typer.Exit(comparison.code)


def compare(
    rows: Mapping[str, Row],
    setting: Setting,
    columns: Sequence[str],
    json_path: Path | None,
    **options: Any,
) -> Comparison:
    """Measure rows, show the results and write them to ``json_path``."""
    console = Console()
    if json_path:
        writable_file(json_path, "bench")
    comparison = Comparison.of(rows, setting, **options)
    comparison.run(console)
    comparison.show(console, columns)
    comparison.write(json_path)
    return comparison
