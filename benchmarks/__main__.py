"""``python -m benchmarks``: frameworks compared, and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.field import FIELD, Field
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
            device,
            batch_size,
            steps,
            timeout,
            repeats,
            frameworks=True,
            rows="benchmarks.field:FIELD",
        ),
        json_path,
        chart=chart,
        models=models,
        towers=towers,
        processes=towers,
        strategies=f"plain,plain-frozen,{strategies}",
    )
    if chart:
        _draw(comparison.document(), chart)
    raise typer.Exit(comparison.code)


@app.command(cls=Command)
def draw(
    report: Annotated[Path, typer.Argument(help="JSON of a comparison")],
    picture: Annotated[Path, typer.Argument(help="the picture to write")],
) -> None:
    """Draw what `keras-towers bench` or `field` has written."""
    _draw(json.loads(report.read_text()), picture)


def _draw(document: Any, picture: Path) -> None:
    from benchmarks import charts

    charts.draw(document).savefig(picture, dpi=130)


if __name__ == "__main__":
    app()
