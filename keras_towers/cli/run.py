"""``keras-towers run``: start a script as the ranks of a distributed job."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
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
from keras_towers.rendezvous.tf_config import Member
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


_SHORT = {
    **dict.fromkeys(("-n", "-np", "--num-proc"), "processes"),
    "-H": "hosts",
}
# Each says how many processes to start.
_NUMBERS = (
    "processes",
    "workers",
    "hosts",
    "hostfile",
    "min_np",
    "host_discovery_script",
)
# Options that scripts often have, too.
_OF_MANY_SCRIPTS = ("--module", "--output", "--script", "--seed")


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
        """The fields of those that the script gets, by their words."""
        words = (w.partition("=")[0] for w in self.arguments or ())
        found = {word: _field_of(word) for word in words}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {
            word: name
            for word, name in found.items()
            if name in defaults and getattr(self, name) == defaults[name]
        }

    def named(self, *options: str) -> str:
        """Name those of some options that are given; empty: none of them."""
        given = (n for n in options if getattr(self, n) is not None)
        names = (f"--{name.replace('_', '-')}" for name in given)
        return " and ".join(names).replace("--hosts", "-H")


def _field_of(word: str) -> str:
    """Return the field of an option of the command; empty: it is none."""
    if word in _OF_MANY_SCRIPTS or not (word in _SHORT or word[:2] == "--"):
        return ""
    return _SHORT.get(word, word[2:].replace("-", "_"))


def run(**options: Any) -> None:
    """Run a script as N processes that train one model together.

    Use -np on this machine, -H on several hosts, --min-np if hosts come and go,
    --workers if the script itself enters MultiWorkerTowerStrategy, and --ps
    with --workers for parameter servers. Each line of output begins with its
    rank. If a rank fails, the command stops the others and returns its exit
    code.

    keras-towers run -np 4 --strategy horovod train.py --epochs 5

    If srun, mpirun or torchrun starts this command, or if TF_CONFIG is set, it
    runs the script as one process of that job.

    Args:
        script: The script that each rank runs.
        arguments: Arguments and options for SCRIPT.
        module: Take SCRIPT as the name of a module, as python -m does.
        strategy: Run the unmodified script inside this strategy. Options follow
            the name, as in horovod:weights=sharded:shard_over=process.
        no_strategy: Each process trains a separate model, unless the script
            itself connects them.
        towers: Towers per process, with --strategy or --ps. Without GPUs, this
            splits the CPU into as many devices.
        seed: Seed of all ranks, with --strategy. Default: a random one.
        device_memory: Memory of each device, such as 24GiB, which fit checks
            before the first step. 0: no check. Default: the memory of GPUs.
        output: Also write each rank's output to a file in this folder.
        processes: Number of processes. Default: as many as all hosts take.
        hosts: Hosts, and the number of ranks that each takes (slots). Default:
            the cluster's hosts, or this machine.
        hostfile: A file of hosts, with lines like 'host slots=2' (2 ranks).
        network_interface: Network interface over which ranks meet. Default: the
            one with a route to the hosts.
        workers: Number of processes that train, connected by TensorFlow or,
            with --ps, by parameter servers.
        ps: Number of parameter servers to start on this machine.
        servers: Number of BytePS servers to start. Default: 1 with --strategy
            byteps, else none.
        stall_warning: Seconds until a waiting rank names the ranks that it
            waits for. 0: never.
        stall_shutdown: Seconds until a stalled job ends. 0: never.
        grace: Seconds between SIGTERM and SIGKILL, for example to save a
            kt.Backup.
        restarts: How often to start all processes again if one is killed, ends
            with exit code 75, or is on a host that does not answer. With
            kt.Backup, fit resumes.
        standby: To restart faster, keep a second process for each rank, with
            TensorFlow imported. Export the variables that TensorFlow reads on
            import.
        min_np: Minimum number of ranks of an elastic job.
        max_np: Maximum number of ranks of an elastic job.
        host_discovery_script: A program that prints the available hosts of an
            elastic job, one per line, as in host1:2 (2 ranks). It runs once a
            second.
        elastic_timeout: Seconds to wait for hosts that take --min-np ranks.
            Default: 600.
        blacklist_cooldown_range: Shortest and longest time for which an elastic
            job avoids a host on which a rank has failed. It doubles with each
            failure. Default: 5 600.
        reset_limit: How often an elastic job starts again. Default: twice
            without a backup in between, else no limit.
        commits: Folder for the commits of kt.elastic, which all hosts share.
            Default: a temporary one; on several hosts, in the working folder.
    """
    given = RunOptions(**options)
    _check_variables()
    if given.device_memory is not None:
        memory = given.device_memory
        parse_bytes(f"--device-memory {memory}", memory)
    strategy, named = parse(given.strategy) if given.strategy else (None, {})
    if "towers" in named:
        raise TowerError(
            "--strategy takes no option towers: give --towers "
            f"{named['towers']}"
        )
    plan = _make_plan(given, _choose_engine(given, strategy))
    check_script(given.script, given.module)
    _check_strategy(given, strategy, named, plan)
    _check_restarts(given, plan)
    if plan.joined and given.output:
        raise TowerError(
            f"--output does not work for {plan.joined}: its launcher writes "
            "the logs"
        )
    setup = Setup(
        strategy=strategy,
        options=named,
        suggested=None if strategy or given.no_strategy else plan.suggested,
        has_servers=plan.has_servers,
        towers=given.towers,
        module=given.module,
    )
    elastic = None
    if given.is_elastic:
        elastic = ElasticOptions(
            ranks=plan.ranks,
            min_ranks=given.min_np or given.ranks or 0,
            max_ranks=given.max_np,
            hosts=plan.hosts,
            script=given.host_discovery_script,
            timeout_s=given.elastic_timeout or settings.ELASTIC_TIMEOUT_S,
            cooldown_s=given.blacklist_cooldown_range
            or settings.ELASTIC_COOLDOWN_S,
        )
    job = Job(
        command=setup.command(given.script, *(given.arguments or [])),
        ranks=plan.ranks,
        hosts=plan.hosts or {"localhost": plan.ranks},
        interface=given.network_interface,
        stall_warning_s=given.stall_warning,
        stall_shutdown_s=given.stall_shutdown,
        seed=_seed(given.seed, plan.joined) if strategy else None,
        output=given.output,
        grace_s=given.grace,
        engine=plan.engine,
        servers=plan.servers,
        no_strategy=given.no_strategy,
        elastic=elastic,
        restarts=given.reset_limit if elastic else given.restarts,
        commits=given.commits,
        standby=given.standby,
        device_memory=given.device_memory,
    )
    if given.behind_script:
        typer.echo(
            f"keras-towers run: options of this command go before "
            f"{given.script}, {given.behind_script}",
            err=True,
        )
    if plan.joined:
        _exec_as_rank(job)
    if strategy and plan.has_several_workers:
        typer.echo(f"keras-towers run: seed {job.seed}", err=True)
    raise typer.Exit(run_job(job).code)


# The parameters of the command are the fields of the record.
vars(run)["__signature__"] = inspect.signature(RunOptions, eval_str=True)


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
        servers: the number of servers.
    """

    engine: Engine
    ranks: int
    hosts: dict[str, int] | None = None
    elastic: bool = False
    joined: Member | None = None
    servers: int | None = None

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


def _choose_engine(given: RunOptions, strategy: str | None) -> Engine:
    """Return what connects the processes, by the strategy or the options."""
    known = STRATEGIES.get(strategy or "")
    engine = known.engine if known else None
    tasks = given.ps or given.workers
    if strategy and not (known or tasks or given.servers):
        # The strategy of another package connects its processes by itself.
        engine = Engine(strategy, strategy, strategy, strategy)
    if tasks and known and not (engine and engine.roles):
        raise TowerError(
            f"--ps and --workers do not work with the strategy {strategy}: "
            "give -np N"
        )
    if engine is None:
        servers = None if known else given.servers
        engine = known_engines.choose(given.ps, given.workers, servers)
    if given.ps and not engine.serves:
        raise TowerError(
            f"the strategy {strategy} does not use parameter servers: leave "
            "out --ps"
        )
    if given.processes and tasks:
        raise TowerError(
            "give --workers for the processes that train, instead of -np"
        )
    if given.servers and engine is not known_engines.BYTEPS:
        raise TowerError(
            f"the strategy {strategy or engine.strategy} does not use servers: "
            f"leave out --servers, or give --strategy "
            f"{known_engines.BYTEPS.strategy}"
        )
    elsewhere = given.named(
        "hosts",
        "hostfile",
        "network_interface",
        "min_np",
        "max_np",
        "host_discovery_script",
    )
    if given.ps and elsewhere:
        raise TowerError(
            f"{elsewhere} cannot be given with parameter servers: this command "
            "starts them on this machine only. On several machines, start the "
            "script on each with TF_CONFIG"
        )
    return engine


def _make_plan(given: RunOptions, engine: Engine) -> LaunchPlan:
    """Decide which processes the command starts."""
    ranks, hosts = given.ranks, given.slots
    servers = given.ps or given.servers
    if engine.servers and not engine.serves:
        servers = servers or 1
    if given.is_elastic:
        _refuse_other_launcher("an elastic job")
        number = ranks or sum((hosts or {}).values())
        return LaunchPlan(engine, number, hosts, elastic=True, servers=servers)
    if hosts is None:
        joined = _plan_to_join(engine, ranks)
        if joined and servers:
            raise TowerError(
                "servers need a job whose processes this command starts: give "
                "-np, and -H for other machines"
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
        late = given.late_options.items()
        named = ", ".join(word for word, name in late if name in _NUMBERS)
        text = f"give the number of processes: {named or '-np N'}"
        if engine.roles:
            named = named or "--workers N"
            text = f"give the number of processes that train: {named}"
        if given.behind_script:
            text += f", before {given.script}, {given.behind_script}"
        raise TowerError(text)
    return LaunchPlan(engine, ranks, hosts, servers=servers)


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


def _seed(seed: int | None, member: Member | None) -> int:
    """Return the given seed, or one that is the same on all ranks."""
    if seed is not None:
        return seed
    if member is None:
        return secrets.randbelow(2**31)
    # Another launcher passes no seed: derive it from the job's identity.
    digest = hashlib.sha256(member.identity().encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def _check_strategy(
    given: RunOptions,
    strategy: str | None,
    options: Mapping[str, object],
    plan: LaunchPlan,
) -> None:
    if given.no_strategy and (strategy or plan.has_servers):
        other = "--strategy" if strategy else "--ps"
        raise TowerError(f"give --no-strategy or {other}, not both")
    if given.towers is not None and not strategy and not plan.has_servers:
        raise TowerError("--towers needs --strategy, or --ps")
    if given.seed is not None and not strategy:
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


def _check_restarts(given: RunOptions, plan: LaunchPlan) -> None:
    limits = given.named(
        "elastic_timeout", "blacklist_cooldown_range", "reset_limit"
    )
    if limits and not plan.elastic:
        raise TowerError(
            f"{limits} cannot be given without --min-np, which makes a job "
            "elastic"
        )
    restarts = given.restarts
    if restarts and plan.elastic:
        raise TowerError(
            f"--restarts {restarts} is for jobs with a fixed number of "
            "processes: an elastic job always starts again after a loss. To "
            f"limit that, give --reset-limit {restarts} instead"
        )
    if restarts and plan.joined:
        raise TowerError(
            f"--restarts does not work for {plan.joined}: its launcher must "
            "start all processes again"
        )
    needless = given.standby or given.commits
    if needless and not restarts and not plan.elastic:
        raise TowerError(
            f"{'--standby' if given.standby else '--commits'} needs a job "
            "that may start again: give --restarts or --min-np, too"
        )
