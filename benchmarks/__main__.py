"""``python -m benchmarks``: frameworks compared, pictures, and adoption."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.field import Field
from benchmarks.rows import FIELD
from keras_towers.bench.runner import Setting
from keras_towers.cli import Command
from keras_towers.cli.bench import (
    BatchSize,
    Device,
    JsonPath,
    Models,
    On,
    Repeats,
    Steps,
    Strategies,
    Timeout,
    Towers,
    compare,
)

# How often a model is adopted.
_TIMES = 4

app = typer.Typer(
    name="python -m benchmarks",
    help="The benchmarks of the documentation.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command(cls=Command)
def field(
    models: Models = "small,large,cnn",
    towers: Towers = "auto",
    strategies: Strategies = "default",
    steps: Steps = 60,
    batch_size: BatchSize = 64,
    repeats: Repeats = 1,
    device: On = Device.AUTO,
    timeout: Timeout = 300,
    json_path: JsonPath = None,
    chart: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Also draw it, as .svg or .png."),
    ] = None,
) -> None:
    """Compare frameworks on the same model, weights and data.

    A row counts only if its losses are those of one device. On CPUs a device is
    a core, and all steps wait for their losses.
    """
    comparison = compare(
        Field,
        FIELD,
        Setting(
            *(device, batch_size, steps, timeout, repeats),
            frameworks=True,
            rows="benchmarks.rows:FIELD",
        ),
        json_path,
        chart=chart,
        models=models,
        towers=towers,
        processes=towers,
        strategies=f"plain,plain-frozen,{strategies}",
    )
    if chart:
        _draw([comparison.document()], chart)
    raise typer.Exit(comparison.code)


@app.command(cls=Command)
def draw(
    reports: Annotated[list[Path], typer.Argument(help="JSON files")],
    picture: Annotated[Path, typer.Argument(help="the picture to write")],
    steps: Annotated[
        int, typer.Option(help="how many steps of a trace to draw")
    ] = 3,
) -> None:
    """Draw what bench, a comparison, kt.Timeline or scaling has written."""
    documents = [json.loads(report.read_text()) for report in reports]
    _draw(documents, picture, steps)


def _draw(documents: list[Any], picture: Path, steps: int = 0) -> None:
    from benchmarks import charts

    charts.draw(documents, steps).savefig(picture, dpi=130)


@app.command()
def adoption(
    towers: Annotated[int, typer.Option(min=1, help="Number of towers.")] = 2,
    strategy: Annotated[str, typer.Option(help="Its name.")] = "tower",
) -> None:
    """Time how long a strategy takes to adopt and release a 100 MB model."""
    import keras

    import keras_towers as kt

    kt.virtual_towers(towers)
    hidden = [keras.layers.Dense(1250, "relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((1250,)), *hidden])
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    arrays = [variable.numpy() for variable in variables]
    copied, adopted, released = [], [], []
    for _ in range(_TIMES):
        start = time.perf_counter()
        copies = [array.copy() for array in arrays]
        copied.append(time.perf_counter() - start)
        del copies
        start = time.perf_counter()
        with kt.strategy(strategy, towers=towers) as entered:
            entered.adopt(model)
            end = time.perf_counter()
            adopted.append(end - start)
        released.append(time.perf_counter() - end)
    first, *later = adopted
    for name, seconds in (
        ("one copy by numpy", statistics.median(copied)),
        ("first adoption in a process", first),
        ("adoption", statistics.median(later)),
        ("release", statistics.median(released)),
    ):
        print(f"{name}: {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    app()
