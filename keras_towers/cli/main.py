"""The ``keras-towers`` command, and ``keras-towers verify``."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from keras_towers import __version__, _imports
from keras_towers.bench.models import call_named
from keras_towers.building.recipe import InstallError
from keras_towers.cli.bench import bench
from keras_towers.cli.doctor import doctor
from keras_towers.cli.install import install
from keras_towers.cli.run import run
from keras_towers.errors import CompatibilityError, TowerError

if TYPE_CHECKING:
    from keras_towers.verification import Verification


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


def verify(
    target: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION")],
    towers: int | None = None,
    batch_size: int | None = None,
    steps: int = 3,
    tolerance: float = math.inf,
) -> None:
    """Measure how far training on towers is from training on one device.

    A few steps run on both, and their weights and logs are compared.

    The exit code is 0; 1 if the difference is larger than --tolerance; and 2
    if it cannot be measured.

    Args:
        target: A function without arguments that returns a compiled model and
            data, as for fit: (model, x), (model, x, y), (model, x, y,
            sample_weight) or (model, dataset).
        towers: Number of towers. Default: all GPUs; without GPUs, the devices
            that the function makes, or 2 on the CPU.
        batch_size: Examples in a batch of arrays.
        steps: How many steps to compare.
        tolerance: The largest acceptable difference.
    """
    try:
        found = _measure(target, towers, batch_size, steps)
    except TowerError:
        raise
    except Exception as error:
        raise TowerError(
            f"{target} cannot be measured: {type(error).__name__}: {error}"
        ) from error
    typer.echo(found)
    if found.difference > tolerance:
        raise typer.Exit(1)


def _measure(
    target: str, towers: int | None, batch_size: int | None, steps: int
) -> Verification:
    import tensorflow as tf

    import keras_towers as kt

    if not tf.config.list_physical_devices("GPU"):
        kt.virtual_towers(2 if towers is None else towers)
    model, *data = _build(target)
    return kt.verify(
        model,
        *data,
        strategy=kt.TowerStrategy(towers),
        batch_size=batch_size,
        steps=steps,
    )


def _build(target: str) -> tuple[Any, ...]:
    """Call the named function, or raise ``TowerError``."""
    built = call_named(target)
    if not isinstance(built, tuple) or not 2 <= len(built) <= 4:
        raise TowerError(
            f"{target} has to return (model, x), (model, x, y), (model, x, y, "
            f"sample_weight) or (model, dataset), but returned {built!r:.200}."
        )
    return built


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
