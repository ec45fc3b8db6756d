"""``keras-towers run``: start a script as the ranks of a distributed job."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from keras_towers.cli.byteps_options import Servers, servers_of
from keras_towers.cli.elastic_options import (
    BlacklistCooldownRange,
    ElasticTimeout,
    HostDiscoveryScript,
    MaxNp,
    MinNp,
    ResetLimit,
    Slots,
)
from keras_towers.cli.rank_command import check_script, rank_command
from keras_towers.cli.tf_tasks import (
    Ps,
    Workers,
    check_only_here,
    tf_tasks,
)
from keras_towers.errors import TowerError
from keras_towers.launching import inside
from keras_towers.launching.elastic import elastic_options, run_elastic
from keras_towers.launching.job import Job, run_job
from keras_towers.launching.tf_job import run_cluster
from keras_towers.meeting.environments import tf_config
from keras_towers.meeting.hosts import parse_hostfile, parse_hosts
from keras_towers.strategies.registry import STRATEGIES


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]...",
            help="What each rank runs; ARGUMENTS are passed to SCRIPT.",
            show_default=False,
        ),
    ],
    processes: Annotated[
        int | None,
        typer.Option(
            "-np",
            "--num-proc",
            metavar="N",
            help="Number of processes. Default: those of the cluster's "
            "allocation, where there is one.",
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "-H",
            "--hosts",
            metavar="HOST:SLOTS,...",
            help="Hosts to run on. Default: those of the cluster's "
            "allocation, or this machine.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(help="Hosts in a file, with lines like 'host slots=2'."),
    ] = None,
    ps: Ps = None,
    workers: Workers = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run the unmodified script inside this strategy, such as "
            "horovod. Default: the script enters a strategy itself.",
        ),
    ] = None,
    towers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Towers per process, with --strategy or --ps. With --ps it "
            "splits a CPU into as many.",
        ),
    ] = None,
    servers: Servers = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**32 - 1,
            help="Random seed of all ranks, with --strategy. Default: a random "
            "seed.",
        ),
    ] = None,
    module: Annotated[
        bool,
        typer.Option("-m", help="SCRIPT is a module name, as for python -m."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Also write each rank's output to a file here.",
        ),
    ] = None,
    stall_warning: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="HOROVOD_STALL_CHECK_TIME_SECONDS",
            help="Seconds until a waiting rank reports which ranks it waits "
            "for; 0: never.",
        ),
    ] = 30,
    stall_shutdown: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            help="Seconds until a stalled job is ended; 0: never.",
        ),
    ] = 600,
    grace: Annotated[
        int,
        typer.Option(
            min=0,
            help="Seconds that a script may take to end after SIGTERM, for a "
            "backup (kt.Backup), before it is killed.",
        ),
    ] = 30,
    network_interface: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Network interface for the rendezvous. Default: loopback if "
            "all ranks are local, otherwise the one with a route to the hosts.",
        ),
    ] = None,
    ssh_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="ssh port of the hosts."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option(help="Print which rank is started on which host.")
    ] = False,
    min_np: MinNp = None,
    max_np: MaxNp = None,
    host_discovery_script: HostDiscoveryScript = None,
    slots: Slots = 1,
    elastic_timeout: ElasticTimeout = 600,
    blacklist_cooldown_range: BlacklistCooldownRange = (5, 600),
    reset_limit: ResetLimit = None,
) -> None:
    """Run a script as N processes that train one model together.

    Each line of output is tagged with its rank. If a rank fails, the others are
    stopped, and its exit code is that of the command.

    keras-towers run -np 4 --strategy horovod train.py --epochs 5

    Under srun, mpirun or torchrun it runs the script as one of their processes.
    """
    elastic = (min_np, max_np, host_discovery_script) != (None, None, None)
    try:
        if hosts and hostfile:
            _refuse("give -H or --hostfile, not both")
        tasks = tf_tasks(strategy, ps, workers, processes)
        if tasks:
            check_only_here(
                {
                    "-H": hosts,
                    "--hostfile": hostfile,
                    "--network-interface": network_interface,
                    "--ssh-port": ssh_port,
                    "--min-np": min_np,
                    "--max-np": max_np,
                    "--host-discovery-script": host_discovery_script,
                }
            )
            processes = sum(tasks.values())
        named = parse_hosts(hosts) if hosts else None
        if hostfile:
            named = parse_hostfile(hostfile)
        rank = None
        if not elastic and named is None and not tasks:
            rank = inside.rank_to_be(processes)
            if rank is None:
                processes, named = inside.allocated(processes)
        if not elastic and processes is None and rank is None:
            _refuse("give the number of processes: -np N")
        for name, value in (
            ("-np", processes),
            ("--min-np", min_np),
            ("--max-np", max_np),
        ):
            if value is not None and value < 1:
                _refuse(f"{name} must be at least 1, not {value}")
        check_script(command[0], module)
        task = None
        if not (elastic or named or processes or tasks):
            task = tf_config.from_environment()
        served = bool(task.ps if task else tasks and tasks.get("ps"))
        program = rank_command(command, strategy, towers, module, served)
        if task is not None:
            inside.become(
                task,
                program,
                seed=seed,
                seeded=strategy is not None,
                interface=None,
                stall_warning_s=stall_warning,
                stall_shutdown_s=stall_shutdown,
            )
        known = STRATEGIES.get(strategy or "")
        if known and known.one_process and (elastic or rank or processes != 1):
            _refuse(
                f"the strategy {strategy} works in one process only: use "
                "-np 1, or --strategy horovod"
            )
        servers = servers_of(servers, strategy, not (elastic or rank or tasks))
        if rank:
            if output:
                _refuse(f"--output is not for {rank}, which has its own")
            inside.become(
                rank,
                program,
                seed=seed,
                seeded=strategy is not None,
                interface=network_interface,
                stall_warning_s=stall_warning,
                stall_shutdown_s=stall_shutdown,
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
            grace_s=grace,
            verbose=verbose,
            servers=servers,
        )
        if tasks:
            code = run_cluster(job, tasks).code
        elif not elastic:
            code = run_job(job).code
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


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"keras-towers run: {reason}", err=True)
    raise typer.Exit(2)
