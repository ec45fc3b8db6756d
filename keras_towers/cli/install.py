"""``keras-towers install``: engines that pip alone cannot install."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from keras_towers import engines
from keras_towers.building.build import Progress, build_wheel, install_wheel
from keras_towers.building.recipe import Recipe
from keras_towers.errors import TowerError
from keras_towers.system import handle_signals

_BUILT = {name: e for name, e in engines.ENGINES.items() if e.recipe}


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
    """Build an engine that connects processes, and install it.

    It is compiled for the TensorFlow of this environment, with a C++17 compiler
    and make: two or three minutes on two idle cores. The wheel is cached, so
    the next installation on this machine takes seconds.

    Args:
        with_mpi: Build with MPI in addition to Gloo (horovod).
        with_nccl: Build with NCCL, for GPUs; needs the CUDA toolkit. Not yet
            tested on a GPU.
        rebuild: Build even if a cached wheel exists.
    """
    if engine not in _BUILT:
        raise TowerError(
            f"unknown engine {engine!r}; choose {' or '.join(_BUILT)}"
        )
    kind = _BUILT[engine].load(_BUILT[engine].recipe)
    chosen = {"with_mpi": with_mpi, "with_nccl": with_nccl}
    options = {name for name, is_on in chosen.items() if is_on}
    for name in options - {field.name for field in dataclasses.fields(kind)}:
        raise TowerError(
            f"{kind.title} has no option --{name.replace('_', '-')}: leave it "
            "out"
        )
    _build_and_install(kind(**dict.fromkeys(options, True)), rebuild)


def _build_and_install(recipe: Recipe, rebuild: bool) -> None:
    """Build an engine or take it from the cache, and install it."""
    console = Console(highlight=False)
    start = time.monotonic()
    try:
        # Compilers have their own process group, and would keep running.
        numbers = [signal.SIGTERM, signal.SIGHUP]
        as_ctrl_c = handle_signals(numbers, signal.default_int_handler)
        with as_ctrl_c, _progress(console) as progress:
            wheel, cached = build_wheel(recipe, progress, rebuild)
            cached, engine = install_wheel(recipe, wheel, cached, progress)
    except KeyboardInterrupt:
        text = f"keras-towers install {recipe.name}: interrupted; nothing was"
        typer.echo(f"{text} installed", err=True)
        raise typer.Exit(130) from None
    seconds = time.monotonic() - start
    how = "from the cache" if cached else f"built in {seconds:.0f} s"
    version = engine.version
    if engine.tensorflow:
        version += f" for TensorFlow {engine.tensorflow}"
    console.print(
        f"{recipe.title} {version} installed, {how}; with {engine.built_in}",
        soft_wrap=True,
    )
    console.print("Check it: keras-towers doctor --self-test", style="dim")


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """Yield a function that shows the current activity."""
    with console.status("checking this machine") as status:

        def show(what: str) -> None:
            status.update(what)
            console.print(what, soft_wrap=True)

        yield show
