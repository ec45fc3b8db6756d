"""``keras-towers run``: start a script as the ranks of a distributed job."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from keras_towers.errors import TowerError
from keras_towers.launch.elastic import elastic_options, run_elastic
from keras_towers.launch.hosts import parse_hostfile, parse_hosts
from keras_towers.launch.job import Job, run_job
from keras_towers.strategies.registry import STRATEGIES, find

_ELASTIC = "Elastic jobs, whose ranks may come and go"


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]...",
            help="What each rank runs; all after the script is its own.",
            show_default=False,
        ),
    ],
    processes: Annotated[
        int | None,
        typer.Option(
            "-np",
            "--num-proc",
            metavar="N",
            help="Number of processes.",
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "-H",
            "--hosts",
            metavar="HOST:SLOTS,...",
            help="Where they run; this machine if not given.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(help="The same, as lines like 'host slots=2'."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run the script, which need not know of any, inside this "
            "strategy: horovod. Not given: the script does that itself.",
        ),
    ] = None,
    towers: Annotated[
        int | None,
        typer.Option(min=1, help="Towers of each process, with --strategy."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**32 - 1,
            help="What all ranks' random numbers start from, with --strategy; "
            "a random one if not given.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write a file of each rank's output as well."
        ),
    ] = None,
    stall_warning: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="HOROVOD_STALL_CHECK_TIME_SECONDS",
            help="Seconds until a rank says which ranks it waits for; "
            "0: never.",
        ),
    ] = 30,
    stall_shutdown: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            help="Seconds until such a job is ended; 0: never.",
        ),
    ] = 600,
    network_interface: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where ranks meet. Loopback if all run here, else what leads "
            "to the hosts.",
        ),
    ] = None,
    ssh_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="On the hosts.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option(help="Say what is started where.")
    ] = False,
    min_np: Annotated[
        int | None,
        typer.Option(
            help="Go on with this many ranks at least.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    max_np: Annotated[
        int | None,
        typer.Option(help="Take this many at most.", rich_help_panel=_ELASTIC),
    ] = None,
    host_discovery_script: Annotated[
        Path | None,
        typer.Option(
            help="A program that prints the hosts there are, as lines "
            "host:slots; asked once a second.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    slots: Annotated[
        int,
        typer.Option(
            min=1,
            help="Slots of a host that it prints without a number.",
            rich_help_panel=_ELASTIC,
        ),
    ] = 1,
    elastic_timeout: Annotated[
        int,
        typer.Option(
            min=1,
            help="Seconds to wait for --min-np slots, then end.",
            rich_help_panel=_ELASTIC,
        ),
    ] = 600,
    blacklist_cooldown_range: Annotated[
        tuple[int, int],
        typer.Option(
            metavar="SECONDS SECONDS",
            help="Shortest and longest time to keep off a host after a worker "
            "failed on it; it doubles each time.",
            rich_help_panel=_ELASTIC,
        ),
    ] = (5, 600),
    reset_limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="End the job when ranks have come and gone this often.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
) -> None:
    """Run a script as N processes that train one model together.

    Each line of output is tagged with its rank. The exit code is the script's:
    that of the first rank that failed, upon which the others are ended.

    keras-towers run -np 4 --strategy horovod train.py --epochs 5
    """
    elastic = (min_np, max_np, host_discovery_script) != (None, None, None)
    try:
        if not elastic and processes is None:
            _refuse("say how many processes: -np N")
        for name, value in (
            ("-np", processes),
            ("--min-np", min_np),
            ("--max-np", max_np),
        ):
            if value is not None and value < 1:
                _refuse(f"{name} takes a number from 1, not {value}")
        _check_script(command[0], module)
        if hosts and hostfile:
            _refuse("give -H or --hostfile, not both")
        named = parse_hosts(hosts) if hosts else None
        if hostfile:
            named = parse_hostfile(hostfile)
        program = _program(command, strategy, towers, module)
        known = STRATEGIES.get(strategy or "")
        if known and known.one_process and (elastic or processes != 1):
            _refuse(
                f"the strategy {strategy} works in one process: -np 1, or "
                "--strategy horovod"
            )
        if strategy and seed is None:
            seed = secrets.randbelow(2**31)
        if strategy and (processes or 2) > 1:
            typer.echo(f"keras-towers run: seed {seed}", err=True)
        job = Job(
            command=program,
            ranks=processes or min_np or 0,
            hosts=named or {"localhost": processes or 0},
            interface=network_interface,
            ssh_port=ssh_port,
            stall_warning_s=stall_warning,
            stall_shutdown_s=stall_shutdown,
            seed=seed if strategy else None,
            output=output,
            verbose=verbose,
        )
        if not elastic:
            code = run_job(job)
        else:
            code = run_elastic(
                job,
                elastic_options(
                    ranks=processes,
                    least=min_np,
                    most=max_np,
                    hosts=named,
                    script=host_discovery_script,
                    slots=slots,
                    timeout_s=elastic_timeout,
                    reset_limit=reset_limit,
                    cooldown_s=blacklist_cooldown_range,
                ),
            )
    except TowerError as error:
        _refuse(str(error))
    raise typer.Exit(code)


def _program(
    command: list[str], strategy: str | None, towers: int | None, module: bool
) -> list[str]:
    """The command of a rank."""
    if strategy is None:
        if towers is not None:
            _refuse("--towers is an option of a --strategy")
        return [sys.executable, *(["-m"] if module else []), *command]
    find(strategy)
    return [
        *(sys.executable, "-m", "keras_towers.launch.script"),
        *("--strategy", strategy),
        *(["--towers", str(towers)] if towers else []),
        *(["--module"] if module else []),
        *command,
    ]


def _check_script(script: str, module: bool) -> None:
    if module or Path(script).is_file():
        return
    hint = ""
    if Path(script).name.startswith("python"):
        hint = "; give the script itself, without python"
    _refuse(f"there is no script {script}{hint}")


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"keras-towers run: {reason}", err=True)
    raise typer.Exit(2)
