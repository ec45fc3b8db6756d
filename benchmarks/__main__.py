"""``python -m benchmarks``: frameworks compared, pictures, and adoption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import adoption
from benchmarks.field import FIELD_COLUMNS, Field
from benchmarks.rows import FIELD
from keras_towers.bench.compare import check_file
from keras_towers.bench.models import MODELS
from keras_towers.cli.bench import (
    Batches,
    BatchSize,
    Device,
    JsonPath,
    On,
    Repeats,
    Timeout,
)
from keras_towers.cli.refusing import refusing

app = typer.Typer(
    name="python -m benchmarks",
    help="The benchmarks of the documentation.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def field(
    models: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help=f"Models to train, from {', '.join(MODELS)}, or functions "
            "such as benchmarks.models:wide, as for keras-towers bench.",
        ),
    ] = ",".join(MODELS),
    towers: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS",
            help="Numbers of devices, or processes. auto: as many as there are "
            "GPUs or cores and as can share a batch equally, but 8 at most.",
        ),
    ] = "auto",
    strategies: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help=f"Rows to compare, from {', '.join(FIELD)}; default: those "
            "that are installed.",
        ),
    ] = "default",
    batches: Batches = 60,
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
    console = Console()
    with refusing("benchmarks"):
        check_file(chart)
        run = Field.of(
            FIELD,
            models=models,
            towers=towers,
            processes=towers,
            strategies=f"plain,plain-frozen,{strategies}",
            repeats=repeats,
            device=device,
            batch_size=batch_size,
            batches=batches,
            timeout=timeout,
            json_path=json_path,
            frameworks=True,
            worker="benchmarks.worker",
        )
        run.run(console)
    run.show(console, FIELD_COLUMNS)
    run.write(json_path)
    if chart:
        _draw(run.document(), chart)
    raise typer.Exit(run.code)


@app.command()
def draw(
    report: Annotated[Path, typer.Argument(help="what --json wrote")],
    picture: Annotated[Path, typer.Argument(help="the picture to write")],
) -> None:
    """Draw what a comparison measured, also that of keras-towers bench."""
    _draw(json.loads(report.read_text()), picture)


def _draw(document: dict, picture: Path) -> None:
    from benchmarks.charts import draw_results

    draw_results(document).savefig(picture, dpi=130)


app.command("adoption")(adoption.main)

if __name__ == "__main__":
    app()
