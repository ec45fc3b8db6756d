"""``keras-towers run``: start a script as the ranks of a distributed job."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer

from keras_towers import known_engines, settings
from keras_towers._bytes import parse_bytes
from keras_towers.errors import TowerError
from keras_towers.known_engines import Engine
from keras_towers.launching.elastic_hosts import ElasticOptions
from keras_towers.launching.job import Job
from keras_towers.launching.rank_job import run_job
from keras_towers.launching.script import Setup, check_script
from keras_towers.rendezvous import launchers, tf_config
from keras_towers.rendezvous.hosts import (
    allocation,
    parse_hostfile,
    parse_hosts,
)
from keras_towers.rendezvous.launchers import ClusterEnvironment
from keras_towers.rendezvous.rank_environment import INTERFACE, seconds
from keras_towers.rendezvous.tf_config import Cluster
from keras_towers.strategies import (
    STRATEGIES,
    check_options,
    find,
    parse,
    strategy_names,
)

Count: TypeAlias = Annotated[int | None, typer.Option(min=1, metavar="N")]
Seconds: TypeAlias = Annotated[int, typer.Option(min=0, metavar="N")]


def _strategies(incomplete: str) -> list[str]:
    """Return the names that a shell completes."""
    return [name for name in strategy_names() if name.startswith(incomplete)]


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("-np", "-n", "--num-proc", min=1, metavar="N")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", metavar="HOST:SLOTS,...")
    ] = None,
    hostfile: Annotated[Path | None, typer.Option(metavar="PATH")] = None,
    ps: Count = None,
    workers: Count = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE]",
            autocompletion=_strategies,
        ),
    ] = None,
    no_strategy: Annotated[bool, typer.Option("--no-strategy")] = False,
    towers: Count = None,
    servers: Count = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, metavar="N")
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", envvar=settings.ENV_DEVICE_MEMORY),
    ] = None,
    module: Annotated[bool, typer.Option("-m")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    stall_warning: Annotated[
        int, typer.Option(min=0, metavar="N", envvar=settings.ENV_STALL_WARNING)
    ] = settings.STALL_WARNING_S,
    stall_shutdown: Annotated[
        int,
        typer.Option(min=0, metavar="N", envvar=settings.ENV_STALL_SHUTDOWN),
    ] = settings.STALL_SHUTDOWN_S,
    grace: Seconds = settings.SCRIPT_GRACE_S,
    restarts: Annotated[int, typer.Option(min=0, metavar="N")] = 0,
    standby: Annotated[bool, typer.Option("--standby")] = False,
    network_interface: Annotated[
        str | None, typer.Option(metavar="NAME")
    ] = None,
    min_np: Count = None,
    max_np: Count = None,
    host_discovery_script: Annotated[
        Path | None, typer.Option(metavar="PATH")
    ] = None,
    elastic_timeout: Count = None,
    blacklist_cooldown_range: Annotated[
        tuple[int, int] | None, typer.Option(metavar="SECONDS SECONDS")
    ] = None,
    reset_limit: Annotated[int | None, typer.Option(min=0, metavar="N")] = None,
    commits: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
) -> None:
    """Run a script as N processes that train one model together.

    Each line of output begins with its rank. If a rank fails, the command stops
    the others, and returns the exit code of that rank.

    keras-towers run -np 4 --strategy horovod train.py --epochs 5

    Under srun, mpirun or torchrun, or with TF_CONFIG, it runs the script as one
    of the job's processes.

    Args:
        script: The script that each rank runs.
        arguments: Arguments and options of SCRIPT.
        processes: Number of processes. Default: the slots of all hosts.
        hosts: Hosts to run on. Default: the cluster's hosts, or this machine.
        hostfile: A file of hosts, with lines like 'host slots=2'.
        ps: Number of parameter servers, on this machine.
        workers: Number of processes that train. TensorFlow connects them; with
            --ps, parameter servers do.
        strategy: Run the unmodified script inside this strategy, such as
            horovod. Options follow the name, as in
            horovod:weights=sharded:shard_over=process.
        no_strategy: Let each process train a separate model.
        towers: Towers per process, with --strategy or --ps. Without GPUs, the
            CPU is split into this number.
        servers: Number of BytePS servers to start, too. Default: 1 with
            --strategy byteps, else none.
        seed: Seed of all ranks, with --strategy. Default: a random one.
        device_memory: Memory of each device, such as 24GiB: before the first
            step, fit checks whether the model fits. Default: the memory of
            GPUs; 0: no check.
        module: SCRIPT is a module name, as for python -m.
        output: Also write each rank's output to a file in this folder.
        stall_warning: Seconds until a waiting rank reports which ranks it waits
            for; 0: never.
        stall_shutdown: Seconds until a stalled job ends; 0: never.
        grace: Seconds that a script has after SIGTERM, for example to save a
            kt.Backup, before it is killed.
        restarts: How often to start all processes again if one is lost: it was
            killed, its host does not answer, or it ended with exit code 75.
            With kt.Backup, fit resumes.
        standby: Keep a second process for each rank, with TensorFlow imported,
            to start again faster. Export the variables that TensorFlow reads
            when it is imported.
        network_interface: Network interface for the rendezvous. Default: the
            one with a route to the hosts.
        min_np: Elastic jobs: minimum number of ranks.
        max_np: Elastic jobs: maximum number of ranks.
        host_discovery_script: Elastic jobs: a program that prints the available
            hosts, one host:slots per line; run once a second.
        elastic_timeout: Elastic jobs: seconds to wait for --min-np slots before
            giving up. Default: 600.
        blacklist_cooldown_range: Elastic jobs: shortest and longest time to
            avoid a host after a worker fails on it; doubles with each failure.
            Default: 5 600.
        reset_limit: Elastic jobs: how often to start again with other ranks.
            Default: no limit.
        commits: Folder for the commits of kt.elastic, the same on every host.
            Default: a temporary one; on several hosts, in the working folder.
    """
    _check_variables()
    if device_memory is not None:
        parse_bytes(f"--device-memory {device_memory}", device_memory)
    strategy, named = parse(strategy) if strategy else (None, {})
    if "towers" in named:
        raise TowerError(
            f"towers={named['towers']} is not for --strategy: give --towers"
        )
    elastic = bool(min_np or max_np or host_discovery_script)
    engine = _choose_engine(strategy, ps, workers, servers, processes)
    servers = (
        ps or servers or (1 if engine.servers and not engine.serves else None)
    )
    elsewhere = _given(
        {
            "-H": hosts,
            "--hostfile": hostfile,
            "--network-interface": network_interface,
            "--min-np": min_np,
            "--max-np": max_np,
            "--host-discovery-script": host_discovery_script,
        }
    )
    if ps and elsewhere:
        raise TowerError(
            f"{elsewhere} cannot be given with parameter servers: this command "
            "starts them on this machine only. On several machines, start the "
            "script on each with TF_CONFIG"
        )
    plan = _make_plan(
        engine,
        workers or processes or min_np,
        _slots(hosts, hostfile),
        servers,
        elastic,
    )
    check_script(script, module)
    _check_strategy(strategy, named, no_strategy, towers, seed, plan)
    limits = _given(
        {
            "--elastic-timeout": elastic_timeout,
            "--blacklist-cooldown-range": blacklist_cooldown_range,
            "--reset-limit": reset_limit,
        }
    )
    _check_restarts(restarts, standby, commits, limits, plan)
    if plan.joined and output:
        raise TowerError(
            f"--output is not for {plan.joined}, which has its own logs"
        )
    setup = Setup(
        strategy=strategy,
        options=named,
        suggested=None if strategy or no_strategy else plan.suggested,
        has_servers=plan.has_servers,
        towers=towers,
        module=module,
    )
    options = None
    if elastic:
        options = ElasticOptions(
            ranks=plan.ranks,
            min_ranks=min_np or workers or processes or 0,
            max_ranks=max_np,
            hosts=plan.hosts,
            script=host_discovery_script,
            timeout_s=elastic_timeout or settings.ELASTIC_TIMEOUT_S,
            cooldown_s=blacklist_cooldown_range or settings.ELASTIC_COOLDOWN_S,
        )
    job = Job(
        command=setup.command(script, *(arguments or [])),
        ranks=plan.ranks,
        hosts=plan.hosts or {"localhost": plan.ranks},
        interface=network_interface,
        stall_warning_s=stall_warning,
        stall_shutdown_s=stall_shutdown,
        seed=_seed(seed, plan.joined) if strategy else None,
        output=output,
        grace_s=grace,
        engine=engine,
        servers=servers,
        no_strategy=no_strategy,
        elastic=options,
        restarts=reset_limit if elastic else restarts,
        commits=commits,
        standby=standby,
        device_memory=device_memory,
    )
    if plan.joined:
        _exec_as_rank(job)
    if strategy and plan.has_several_workers:
        typer.echo(f"keras-towers run: seed {job.seed}", err=True)
    raise typer.Exit(run_job(job).code)


def _check_variables() -> None:
    """Check what ranks would read, of which some only import the script."""
    launchers.detect()
    tf_config.read_config()
    for name in (
        settings.ENV_NCCL_TIMEOUT,
        settings.ENV_RENDEZVOUS_TIMEOUT,
        settings.ENV_START_TIMEOUT,
    ):
        seconds(name, 0)
    seed = os.environ.get(settings.ENV_SEED, "0")
    if not seed.isdecimal() or int(seed) >= 2**32:
        raise TowerError(
            f"{settings.ENV_SEED} is {seed!r}: give a whole number below 2**32"
        )


def _exec_as_rank(job: Job) -> NoReturn:
    """Run a job's command instead of this program, as a rank."""
    environment = {**os.environ, **job.environment()}
    if job.interface:
        environment[INTERFACE] = job.interface
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(job.command[0], job.command, environment)


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """The processes that a command starts, or the one that it becomes.

    Attributes:
        engine: what connects them.
        ranks: their number to begin with, without servers; 0 if none is given.
        hosts: the slots of the hosts; None for this machine.
        elastic: whether ranks may come and go.
        joined: the rank or task that another launcher made of this process.
    """

    engine: Engine
    ranks: int
    hosts: dict[str, int] | None = None
    elastic: bool = False
    joined: ClusterEnvironment | Cluster | None = None

    @property
    def has_servers(self) -> bool:
        """Whether there are parameter servers."""
        return self.engine is known_engines.SERVED

    @property
    def has_several_workers(self) -> bool:
        """Whether there may be several processes that train."""
        return bool(
            self.elastic or self.joined or self.has_servers or self.ranks != 1
        )

    @property
    def suggested(self) -> str | None:
        """Return the suitable strategy; None for a single process."""
        return self.engine.strategy if self.has_several_workers else None


def _choose_engine(
    strategy: str | None,
    ps: int | None,
    workers: int | None,
    servers: int | None,
    processes: int | None,
) -> Engine:
    """Return what connects the processes, by the strategy or the options."""
    known = STRATEGIES.get(strategy or "")
    if strategy and not (known or ps or workers or servers):
        # The strategy of another package connects its processes by itself.
        return Engine(strategy, strategy, strategy, strategy)
    engine = known.engine if known else None
    if (ps or workers) and known and not (engine and engine.roles):
        raise TowerError(
            f"--ps and --workers are not for the strategy {strategy}, which "
            "connects its processes in another way: give -np N"
        )
    if engine is None:
        engine = known_engines.HOROVOD
        if ps:
            engine = known_engines.SERVED
        elif workers:
            engine = known_engines.RUNTIME
        elif servers and not known:
            engine = known_engines.BYTEPS
    if ps and not engine.serves:
        raise TowerError(
            f"the strategy {strategy} has no use for parameter servers: leave "
            "out --ps"
        )
    if processes and (ps or workers):
        raise TowerError(
            "give --workers for the processes that train, instead of -np"
        )
    if servers and engine is not known_engines.BYTEPS:
        raise TowerError(
            f"--servers is for --strategy {known_engines.BYTEPS.strategy}: the "
            f"strategy {strategy or engine.strategy} has no use for servers"
        )
    return engine


def _make_plan(
    engine: Engine,
    ranks: int | None,
    hosts: dict[str, int] | None,
    servers: int | None,
    elastic: bool,
) -> LaunchPlan:
    """Decide which processes the command starts."""
    if elastic:
        _refuse_other_launcher("an elastic job")
        number = ranks or sum((hosts or {}).values())
        return LaunchPlan(engine, number, hosts, elastic=True)
    if hosts is None:
        joined = _plan_to_join(engine, ranks)
        if joined and servers:
            raise TowerError(
                "servers are for jobs whose processes this command starts: "
                "give -np, and -H for other machines"
            )
        if joined:
            return joined
    if engine.serves and not servers:
        raise TowerError(
            "this strategy needs parameter servers: --ps 1 "
            f"--workers {ranks or 'N'}"
        )
    if engine.roles and ranks != 1:
        _refuse_other_launcher("a cluster")
    if hosts is None and not engine.serves:
        hosts = _allocated_hosts(ranks)
    ranks = ranks or sum((hosts or {}).values())
    if not ranks:
        raise TowerError(
            "give the number of processes that train: --workers N"
            if engine.roles
            else "give the number of processes: -np N"
        )
    return LaunchPlan(engine, ranks, hosts)


def _plan_to_join(engine: Engine, ranks: int | None) -> LaunchPlan | None:
    """Return the plan of another launcher's job that this process joins."""
    task = None if ranks else tf_config.from_environment()
    if task:
        connects = known_engines.SERVED if task.ps else known_engines.RUNTIME
        return LaunchPlan(connects, task.size, joined=task)
    member = None if engine.roles else _rank_to_join(ranks)
    if member is None:
        return None
    return LaunchPlan(engine, member.size or 0, joined=member)


def _rank_to_join(ranks: int | None) -> ClusterEnvironment | None:
    """The rank of another launcher's job that this process joins, if any.

    If the user gives another number of processes than the launcher has started,
    each of these starts a separate job instead.
    """
    member = launchers.detect_foreign()
    return member if member and ranks in (None, member.size) else None


def _refuse_other_launcher(job: str) -> None:
    if _rank_to_join(None):
        raise TowerError(
            "another launcher started this command in several processes, and "
            f"each would start {job}: start it once, without that launcher"
        )


def _allocated_hosts(ranks: int | None) -> dict[str, int] | None:
    """The hosts that a cluster manager has allocated; None if it has not.

    If the user gives a number of processes and the allocation is one host, all
    run there, however few tasks the manager was asked for.
    """
    allocated = allocation()
    if allocated is None or (ranks and len(allocated[1]) == 1):
        return None
    manager, hosts = allocated
    if ranks is None:
        typer.echo(
            f"keras-towers run: {sum(hosts.values())} processes on "
            f"{', '.join(hosts)}, as {manager} says",
            err=True,
        )
    return hosts


def _slots(hosts: str | None, hostfile: Path | None) -> dict[str, int] | None:
    """Return the slots of the given hosts; None if none are given."""
    if hosts and hostfile:
        raise TowerError("give -H or --hostfile, not both")
    if hostfile:
        return parse_hostfile(hostfile)
    return parse_hosts(hosts) if hosts else None


def _seed(seed: int | None, member: ClusterEnvironment | Cluster | None) -> int:
    """Return the given seed, or one that is the same on all ranks."""
    if seed is not None:
        return seed
    if member is None:
        return secrets.randbelow(2**31)
    # Another launcher passes no seed: derive it from the job's identity.
    digest = hashlib.sha256(member.identity().encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def _check_strategy(
    strategy: str | None,
    options: Mapping[str, Any],
    no_strategy: bool,
    towers: int | None,
    seed: int | None,
    plan: LaunchPlan,
) -> None:
    if no_strategy and (strategy or plan.has_servers):
        other = "--strategy" if strategy else "--ps"
        raise TowerError(f"give --no-strategy or {other}, not both")
    if towers is not None and not strategy and not plan.has_servers:
        raise TowerError("--towers needs --strategy, or --ps")
    if seed is not None and not strategy:
        raise TowerError(
            "--seed needs --strategy: if the script enters a strategy itself, "
            "call keras.utils.set_random_seed in it"
        )
    if strategy is None:
        return
    find(strategy)
    known = STRATEGIES.get(strategy)
    if known:
        check_options(strategy, options)
    if known and not known.engine and plan.has_several_workers:
        raise TowerError(
            f"the strategy {strategy} works in one process only: use "
            "-np 1, or --strategy horovod"
        )


def _given(options: Mapping[str, Any]) -> str:
    """Name the options that the user has given; empty: none of them."""
    return " and ".join(n for n, value in options.items() if value is not None)


def _check_restarts(
    restarts: int,
    standby: bool,
    commits: Path | None,
    limits: str,
    plan: LaunchPlan,
) -> None:
    if limits and not plan.elastic:
        raise TowerError(
            f"{limits} cannot be given without --min-np, which makes a job "
            "elastic"
        )
    if restarts and plan.elastic:
        raise TowerError(
            f"--restarts {restarts} is for jobs with a fixed number of "
            "processes: an elastic job always starts again after a loss. To "
            f"limit that, give --reset-limit {restarts} instead"
        )
    if restarts and plan.joined:
        raise TowerError(
            f"--restarts is not for {plan.joined}: it has to start all "
            "processes again itself"
        )
    for option, given in (("--standby", standby), ("--commits", commits)):
        if given and not restarts and not plan.elastic:
            raise TowerError(
                f"{option} is for jobs that may start again: give --restarts "
                "or --min-np, too"
            )
