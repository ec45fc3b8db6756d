"""The processes that ``keras-towers run`` starts, or the one it becomes."""

from __future__ import annotations

import dataclasses

import typer

from keras_towers.cli.run_options import RunOptions
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs import known_engines
from keras_towers.jobs.known_engines import Engine
from keras_towers.jobs.rendezvous import launchers, tf_config
from keras_towers.jobs.rendezvous.hosts import allocation
from keras_towers.jobs.rendezvous.launchers import ClusterEnvironment
from keras_towers.jobs.rendezvous.tf_config import Member
from keras_towers.strategies import STRATEGIES

# Each says how many processes to start.
_NUMBERS = (
    "processes",
    "workers",
    "hosts",
    "hostfile",
    "min_np",
    "host_discovery_script",
)


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


def choose_engine(given: RunOptions, strategy: str | None) -> Engine:
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


def make_plan(given: RunOptions, engine: Engine) -> LaunchPlan:
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
