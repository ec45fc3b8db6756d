"""The ``keras-towers`` command."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from keras_towers import __version__
from keras_towers.cli.bench import bench
from keras_towers.cli.doctor import doctor
from keras_towers.cli.plan import plan
from keras_towers.cli.run import run
from keras_towers.cli.run_options import Count
from keras_towers.foundation import import_hooks
from keras_towers.foundation.errors import (
    CompatibilityError,
    TowerError,
    did_you_mean,
)
from keras_towers.foundation.system import handle_signals
from keras_towers.inspection.user_models import (
    check_named,
    find_named,
    model_and_data,
    naming,
    random_examples,
)
from keras_towers.jobs import known_engines
from keras_towers.jobs.building.build import build_wheel, install_wheel
from keras_towers.jobs.building.recipe import InstallError
from keras_towers.jobs.launching.output import without_noise


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

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse words; an error about the value of an option names it."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            options, *_ = self.make_parser(ctx).parse_args(args=words)
            given = options.get(error.param.name) if error.param else None
            if isinstance(given, str) and repr(given) not in error.message:
                error.message = f"{given!r}: {error.message}"
            raise

    def invoke(self, ctx: Any) -> object:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except TowerError as error:
            reason, code = str(error), 2
        except (CompatibilityError, InstallError) as error:
            reason, code = str(error), 1
        typer.echo(f"{ctx.command_path}: {reason}", err=True)
        raise typer.Exit(code)


class Commands(TyperGroup):
    """The subcommands; a script in their place is told where it belongs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the subcommand that the first word names."""
        is_known = args[0] in self.commands or ctx.resilient_parsing
        if not is_known and Path(args[0]).is_file():
            typer.echo(
                f"keras-towers: {args[0]} is a script: start it by "
                f"`keras-towers run {args[0]}`, or in this process by `python "
                f"-m keras_towers {args[0]}`",
                err=True,
            )
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)


app: typer.Typer = typer.Typer(
    name="keras-towers",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(cls=Command)(bench)
app.command(cls=Command)(doctor)
app.command(cls=Command)(plan)
# All options after the script belong to the script.
app.command(cls=Command, context_settings={"allow_interspersed_args": False})(
    run
)


_BUILT = {name: e for name, e in known_engines.ENGINES.items() if e.recipe}


@app.command(cls=Command, no_args_is_help=True)
def install(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE", help=f"{' or '.join(_BUILT)}.", show_default=False
        ),
    ],
    with_mpi: Annotated[bool, typer.Option("--with-mpi")] = False,
    with_nccl: Annotated[bool, typer.Option("--with-nccl")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild")] = False,
) -> None:
    """Build and install an engine that connects processes.

    keras-towers install horovod

    This builds the engine for the TensorFlow of this environment. You need
    make, a C++17 compiler, and two or three minutes on two idle cores. The
    command caches the wheel, so the next installation here takes seconds.

    Args:
        with_mpi: Build with MPI, too, for more than 100 ranks (horovod).
        with_nccl: Build with NCCL, to sum on GPUs. Needs '.[gpu]', and for
            Horovod a CUDA toolkit or driver 580. Not yet tested on a GPU.
        rebuild: Build even if a cached wheel exists.
    """
    if engine not in _BUILT:
        raise TowerError(
            f"unknown engine {engine!r}; choose {' or '.join(_BUILT)}"
            f"{did_you_mean(engine, _BUILT)}"
        )
    kind = _BUILT[engine].load(_BUILT[engine].recipe)
    chosen = {"with_mpi": with_mpi, "with_nccl": with_nccl}
    options = {name for name, is_on in chosen.items() if is_on}
    for name in options - {field.name for field in dataclasses.fields(kind)}:
        raise TowerError(
            f"{kind.title} has no option --{name.replace('_', '-')}: leave it "
            "out"
        )
    recipe = kind(**dict.fromkeys(options, True))
    console = Console(highlight=False)
    # Even the same version may be for another TensorFlow, or not load.
    again = " again" if importlib.util.find_spec(engine) else ""
    start = time.monotonic()
    # Compilers have their own process group, and would keep running.
    as_ctrl_c = handle_signals(
        [signal.SIGTERM, signal.SIGHUP], signal.default_int_handler
    )
    try:
        with as_ctrl_c, console.status("checking this machine") as status:

            def progress(what: str) -> None:
                status.update(what)
                console.print(what, soft_wrap=True)

            wheel, cached = build_wheel(recipe, progress, rebuild)
            cached, installed = install_wheel(recipe, wheel, cached, progress)
    except KeyboardInterrupt:
        typer.echo(
            f"keras-towers install {engine}: interrupted; nothing was "
            "installed",
            err=True,
        )
        raise typer.Exit(130) from None
    seconds = time.monotonic() - start
    how = "from the cache" if cached else f"built in {seconds:.0f} s"
    version = installed.version
    if installed.tensorflow:
        version += f" for TensorFlow {installed.tensorflow}"
    console.print(
        f"{kind.title} {version} installed{again}, {how}; with "
        f"{installed.built_in}",
        soft_wrap=True,
    )
    console.print("Check it: keras-towers doctor --self-test", style="dim")


@app.command(cls=Command)
def verify(
    target: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION")],
    towers: Count = None,
    batch_size: Count = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N")] = 3,
    tolerance: Annotated[float, typer.Option(metavar="X")] = math.inf,
) -> None:
    """Measure how much training on towers differs from one device.

    keras-towers verify my_module:build --tolerance 1e-4

    The exit code is 1 if the difference is larger than --tolerance, 2 if the
    command cannot measure it, and 0 otherwise.

    Args:
        target: A function without arguments. It returns a compiled model, alone
            or with data as for fit: (model, x), (model, x, y), (model, x, y,
            sample_weight) or (model, dataset). Without data, the command makes
            random examples.
        towers: Number of towers. Default: all GPUs or, without GPUs, the
            logical devices that the function makes, else 2.
        batch_size: Examples in a batch of arrays.
        steps: Number of steps to compare.
        tolerance: The largest acceptable difference.
    """
    check_named(target)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    with without_noise():
        import tensorflow as tf

        import keras_towers as kt

    if not tf.config.list_physical_devices("GPU"):
        kt.virtual_towers(2 if towers is None else towers)
    with naming(target, "cannot be measured"):
        model, data = model_and_data(find_named(target)(), target)
        examples = steps * (batch_size or 32)
        differences = kt.verify(
            model,
            *(data or random_examples(model, target, examples)),
            strategy=kt.TowerStrategy(towers),
            batch_size=batch_size,
            steps=steps,
        )
    typer.echo(differences)
    if differences.difference > tolerance:
        typer.echo(
            f"keras-towers verify: {differences.difference:.1e} is larger than "
            f"--tolerance {tolerance:g}",
            err=True,
        )
        raise typer.Exit(1)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    typer.echo(f"keras-towers {__version__}")
    for module in ("keras", "tensorflow"):
        for name, version in import_hooks.packages(module).items():
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
    """Train a Keras 3 model on many devices with one line around fit.

    python -m keras_towers has the same commands. It also runs a script written
    for Horovod or BytePS as one process of another launcher's job:

    srun python -m keras_towers train.py --epochs 5

    If a script has the name of a command, write its path: ./run
    """


COMMANDS: tuple[str, ...] = tuple(typer.main.get_group(app).commands)
"""The names of the subcommands."""


if __name__ == "__main__":
    app(prog_name="keras-towers")
