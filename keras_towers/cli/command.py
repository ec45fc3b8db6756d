"""How subcommands refuse what is wrong: in one line that names them."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from keras_towers.building.recipe import InstallError
from keras_towers.errors import CompatibilityError, TowerError


class Command(TyperCommand):
    """A subcommand whose errors are shown without a traceback.

    The exit code is 2 for what is wrong in the command, and 1 for what is wrong
    on this machine.
    """

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
