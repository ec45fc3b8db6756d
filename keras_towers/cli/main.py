"""The ``keras-towers`` command."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from keras_towers import __version__, _imports
from keras_towers.building.recipe import InstallError
from keras_towers.cli.bench import bench
from keras_towers.cli.doctor import doctor
from keras_towers.cli.install import install
from keras_towers.cli.run import run
from keras_towers.cli.verify import verify
from keras_towers.errors import CompatibilityError, TowerError


class Command(TyperCommand):
    """A subcommand; its docstring provides the help, also of its options.

    Errors are shown without a traceback. The exit code is 2 for a mistake in
    the command, and 1 for a problem on this machine.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.help, _, options = (self.help or "").partition("\n\nArgs:\n")
        # An argument's name, and its text with deeper indentation.
        pattern = r"^ {4}(\w+): (.+(?:\n {8}.+)*)"
        texts = dict(re.findall(pattern, options, re.MULTILINE))
        parameters: Any = self.params
        for parameter in parameters:
            if text := texts.get(parameter.name):
                parameter.help = " ".join(text.split())

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except TowerError as error:
            reason, code = str(error), 2
        except (CompatibilityError, InstallError) as error:
            reason, code = str(error), 1
        typer.echo(f"{ctx.command_path}: {reason}", err=True)
        raise typer.Exit(code)


app: typer.Typer = typer.Typer(
    name="keras-towers",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(cls=Command)(bench)
app.command(cls=Command)(doctor)
app.command(cls=Command, no_args_is_help=True)(install)
app.command(cls=Command)(verify)
# All options after the script belong to the script.
app.command(cls=Command, context_settings={"allow_interspersed_args": False})(
    run
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    typer.echo(f"keras-towers {__version__}")
    for module in ("keras", "tensorflow"):
        for name, version in _imports.packages(module).items():
            typer.echo(f"{name} {version}")
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
    """Train a Keras 3 model on many devices with one line around fit."""


if __name__ == "__main__":
    app(prog_name="keras-towers")
