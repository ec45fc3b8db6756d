"""The ``keras-towers`` command and its subcommands."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from keras_towers.cli.bench import bench

app = typer.Typer(
    name="keras-towers",
    help="Train a Keras 3 model on many devices by one line around fit.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(bench)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    for name in ("keras-towers", "keras", "tensorflow", "tensorflow-cpu"):
        try:
            typer.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the installed versions and exit.",
        ),
    ] = False,
) -> None:
    """Train a Keras 3 model on many devices by one line around fit."""


if __name__ == "__main__":
    app()
