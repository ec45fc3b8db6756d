"""What the comparisons of ``keras-towers bench`` have in common."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress

from keras_towers.bench.runner import CellT, Sample, failed_before
from keras_towers.errors import CompatibilityError, TowerError
from keras_towers.system import handled


def run_all(
    console: Console,
    cells: Sequence[CellT],
    samples: list[Sample[CellT]],
    run: Callable[[CellT], Sample[CellT]],
) -> bool:
    """Run all cells but those that failed before; False if interrupted."""
    # On SIGTERM, clean up and show results exactly as on Ctrl-C.
    try:
        with (
            handled([signal.SIGTERM], signal.default_int_handler),
            Progress(console=console, transient=True) as bar,
        ):
            task = bar.add_task("starting", total=len(cells))
            for done, cell in enumerate(cells):
                title = f"{cell.title} ({done + 1} of {len(cells)})"
                bar.update(task, completed=done, description=title)
                if not failed_before(cell, samples):
                    samples.append(run(cell))
    except KeyboardInterrupt:
        return False
    return True


def check_gpus(needed: int, gpus: int) -> None:
    """Check that there are enough GPUs.

    Raises:
        TowerError: there are fewer.
    """
    if gpus < needed:
        raise TowerError(
            f"{needed} GPUs are needed for --towers, {gpus} visible"
        )


def end(
    console: Console, complete: bool, cells: int, samples: Sequence[Sample]
) -> None:
    """End with the exit code of an interrupted or a failed run, if it was."""
    if not complete:
        console.print(f"Interrupted: {len(samples)} of {cells} runs made.")
        raise typer.Exit(130)
    if any(sample.error for sample in samples):
        raise typer.Exit(1)


def check_folder(path: Path | None) -> None:
    """Check that a file can be written, before there is anything to write.

    Raises:
        TowerError: it is a folder, or its folder does not exist.
    """
    if path and path.is_dir():
        raise TowerError(f"{path} is a folder; name a file in it")
    if path and not path.absolute().parent.is_dir():
        raise TowerError(f"there is no folder {path.absolute().parent}")


def check_together(
    name: str, others: Mapping[str, Any], present: bool = True
) -> None:
    """Check options that only fit with or without another one.

    Args:
        name: the other option.
        others: the values of options by name; those that are given are checked.
        present: whether the other option is given, which they do not go with;
            otherwise they need it.

    Raises:
        TowerError: one is given that does not fit.
    """
    for other, value in others.items():
        if value and present:
            raise TowerError(f"{name} cannot be combined with {other}")
        if value:
            raise TowerError(f"{other} needs {name}")


@contextlib.contextmanager
def refusing(code: int) -> Iterator[None]:
    """Turn errors into one line on stderr and this exit code."""
    try:
        yield
    except (CompatibilityError, TowerError) as error:
        typer.echo(f"keras-towers bench: {error}", err=True)
        raise typer.Exit(code) from None
