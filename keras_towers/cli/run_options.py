"""The arguments and options of ``keras-towers run``."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous.hosts import parse_hostfile, parse_hosts
from keras_towers.strategies import strategy_names

Count: TypeAlias = Annotated[int | None, typer.Option(min=1, metavar="N")]
Seconds: TypeAlias = Annotated[int, typer.Option(min=0, metavar="N")]


def _strategies(incomplete: str) -> list[str]:
    """Return the names that a shell completes."""
    return [name for name in strategy_names() if name.startswith(incomplete)]


# Options that scripts often have, too.
_OF_MANY_SCRIPTS = ("-m", "--module", "--output", "--seed")


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The arguments and options of the command, as they are given."""

    script: Annotated[str, typer.Argument(metavar="SCRIPT")]
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS")
    ] = None
    module: Annotated[bool, typer.Option("-m")] = False
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME[:OPTION=VALUE]", autocompletion=_strategies),
    ] = None
    no_strategy: Annotated[bool, typer.Option("--no-strategy")] = False
    towers: Count = None
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, metavar="N")
    ] = None
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", envvar=settings.ENV_DEVICE_MEMORY),
    ] = None
    output: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None
    processes: Annotated[
        int | None, typer.Option("-np", "-n", "--num-proc", min=1, metavar="N")
    ] = None
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", metavar="HOST:SLOTS,...")
    ] = None
    hostfile: Annotated[Path | None, typer.Option(metavar="PATH")] = None
    network_interface: Annotated[str | None, typer.Option(metavar="NAME")] = (
        None
    )
    workers: Count = None
    ps: Count = None
    servers: Count = None
    stall_warning: Annotated[
        int, typer.Option(min=0, metavar="N", envvar=settings.ENV_STALL_WARNING)
    ] = settings.STALL_WARNING_S
    stall_shutdown: Annotated[
        int,
        typer.Option(min=0, metavar="N", envvar=settings.ENV_STALL_SHUTDOWN),
    ] = settings.STALL_SHUTDOWN_S
    grace: Seconds = settings.SCRIPT_GRACE_S
    restarts: Annotated[int, typer.Option(min=0, metavar="N")] = 0
    standby: Annotated[bool, typer.Option("--standby")] = False
    min_np: Count = None
    max_np: Count = None
    host_discovery_script: Annotated[
        Path | None, typer.Option(metavar="PATH")
    ] = None
    elastic_timeout: Count = None
    blacklist_cooldown_range: Annotated[
        tuple[int, int] | None, typer.Option(metavar="SECONDS SECONDS")
    ] = None
    reset_limit: Annotated[int | None, typer.Option(min=0, metavar="N")] = None
    commits: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None

    @property
    def ranks(self) -> int | None:
        """The number of processes that train, if it is given."""
        return self.workers or self.processes or self.min_np

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may come and go."""
        return bool(self.min_np or self.max_np or self.host_discovery_script)

    @property
    def slots(self) -> dict[str, int] | None:
        """The slots of the given hosts; None if none are given."""
        if self.hosts and self.hostfile:
            raise TowerError("give -H or --hostfile, not both")
        if self.hostfile:
            return parse_hostfile(self.hostfile)
        return parse_hosts(self.hosts) if self.hosts else None

    @property
    def behind_script(self) -> str:
        """Say which options of the command the script gets; empty: none."""
        late = ", ".join(self.late_options)
        return late and f"which gets {late} behind it"

    @property
    def late_options(self) -> dict[str, str]:
        """The options of the command that the script gets, and their fields.

        They come after the script, and nothing before it sets their fields.
        """
        defaults = {
            f.name
            for f in dataclasses.fields(self)
            if getattr(self, f.name) == f.default
        }
        words = [w.partition("=")[0] for w in self.arguments or ()]
        fields = _fields_of_options()
        return {w: fields[w] for w in words if fields.get(w) in defaults}

    def named(self, *options: str) -> str:
        """Name those of some options that are given; empty: none of them."""
        given = (n for n in options if getattr(self, n) is not None)
        names = (f"--{name.replace('_', '-')}" for name in given)
        return " and ".join(names).replace("--hosts", "-H")


@functools.cache
def _fields_of_options() -> dict[str, str]:
    """Return the fields of all options that few scripts have."""
    app = typer.Typer(add_completion=False)
    app.command()(RunOptions)
    return {
        word: str(parameter.name)
        for parameter in typer.main.get_command(app).params
        for word in parameter.opts
        if word[0] == "-" and word not in _OF_MANY_SCRIPTS
    }
