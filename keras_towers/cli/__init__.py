"""The ``keras-towers`` command, and how its subcommands refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from keras_towers.errors import CompatibilityError, TowerError

# Typer has no name of its own for all wrong uses of a command line.
_UsageError: Any = typer.BadParameter.__base__


def refuse(command: str, reason: object, code: int = 2) -> NoReturn:
    """End with a line on stderr that names the command."""
    typer.echo(f"keras-towers {command}: {reason}", err=True)
    raise typer.Exit(code)


@contextmanager
def refusing(command: str) -> Iterator[None]:
    """End with 2 on wrong options, and 1 where TensorFlow cannot be used."""
    try:
        yield
    except TowerError as error:
        refuse(command, error)
    except CompatibilityError as error:
        refuse(command, error, 1)


@contextmanager
def _refusing_call(
    name: str | None, args: Any, parent: Any = None, **extra: Any
) -> Iterator[None]:
    """Refuse unknown options and wrong values like all other mistakes."""
    try:
        yield
    except _UsageError as error:
        command = f"{parent.command_path} {name}" if parent else name
        reason = error.format_message().rstrip(".")
        if getattr(error, "option_name", None) == "--batches":
            reason += ": it is --steps now"
        typer.echo(f"{command}: {reason} ({command} --help)", err=True)
        raise typer.Exit(2) from None


class Command(TyperCommand):
    """A subcommand."""

    def make_context(self, *call: Any, **extra: Any) -> Any:
        """Read the arguments."""
        with _refusing_call(*call, **extra):
            return super().make_context(*call, **extra)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage, without Typer's braces around what is required."""
        return [p.strip("{}") for p in super().collect_usage_pieces(ctx)]


class Commands(TyperGroup):
    """Subcommands, of which an unknown name lists the known ones."""

    def make_context(self, *call: Any, **extra: Any) -> Any:
        """Read the arguments before the subcommand."""
        # Without any argument, Typer shows the help.
        with _refusing_call(*call, **extra) if call[1] else nullcontext():
            return super().make_context(*call, **extra)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the subcommand."""
        if self.get_command(ctx, args[0]) is None:
            known = ", ".join(self.list_commands(ctx))
            with _refusing_call(ctx.info_name, args, ctx.parent):
                ctx.fail(f"unknown command {args[0]!r}; choose {known}")
        return super().resolve_command(ctx, args)
