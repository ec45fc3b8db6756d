"""The ``keras-towers`` command, and how its subcommands refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import typer

from keras_towers.errors import CompatibilityError, TowerError


def refuse(command: str, reason: object, code: int = 2) -> NoReturn:
    """End with a line on stderr that names the command."""
    typer.echo(f"keras-towers {command}: {reason}", err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def refusing(command: str) -> Iterator[None]:
    """End with 2 on wrong options, and 1 where TensorFlow cannot be used."""
    try:
        yield
    except TowerError as error:
        refuse(command, error)
    except CompatibilityError as error:
        refuse(command, error, 1)
