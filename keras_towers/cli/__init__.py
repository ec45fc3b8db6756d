"""The ``keras-towers`` command, and how its subcommands refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from keras_towers.building.recipe import InstallError
from keras_towers.errors import CompatibilityError, TowerError

# Typer has no name of its own for all wrong uses of a command line.
_UsageError: Any = typer.BadParameter.__base__


@contextmanager
def _refusing(command: str) -> Iterator[None]:
    """End with a line on stderr that names the command."""
    # 2 for what is wrong in the command, 1 for what is wrong on this machine.
    try:
        yield
        return
    except _UsageError as error:
        reason, code = error.format_message().rstrip("."), 2
        reason += f" ({command} --help)"
    except TowerError as error:
        reason, code = str(error), 2
    except (CompatibilityError, InstallError) as error:
        reason, code = str(error), 1
    typer.echo(f"{command}: {reason}", err=True)
    raise typer.Exit(code)


def _command(
    name: str | None, args: Any, parent: Any = None, **extra: Any
) -> str:
    """The command whose arguments are read."""
    return f"{parent.command_path} {name}" if parent else f"{name}"


class Command(TyperCommand):
    """A subcommand."""

    def make_context(self, *call: Any, **extra: Any) -> Any:
        """Read the arguments."""
        with _refusing(_command(*call, **extra)):
            return super().make_context(*call, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        with _refusing(ctx.command_path):
            return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage, without Typer's braces around what is required."""
        return [p.strip("{}") for p in super().collect_usage_pieces(ctx)]


class Commands(TyperGroup):
    """Subcommands, of which an unknown name lists the known ones."""

    def make_context(self, *call: Any, **extra: Any) -> Any:
        """Read the arguments before the subcommand."""
        # Without any argument, Typer shows the help.
        with _refusing(_command(*call)) if call[1] else nullcontext():
            return super().make_context(*call, **extra)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the subcommand."""
        if self.get_command(ctx, args[0]) is None:
            known = ", ".join(self.list_commands(ctx))
            with _refusing(ctx.command_path):
                ctx.fail(f"unknown command {args[0]!r}; choose {known}")
        return super().resolve_command(ctx, args)
