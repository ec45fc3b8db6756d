"""``keras-towers run``: start a script as the ranks of a distributed job."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from keras_towers import engines, settings
from keras_towers.cli import run_options as options
from keras_towers.errors import TowerError
from keras_towers.launching.elastic import elastic_options, run_elastic
from keras_towers.launching.job import (
    Job,
    allocated,
    become,
    rank_to_be,
    run_cluster,
    run_job,
)
from keras_towers.rendezvous.environments import tf_config
from keras_towers.rendezvous.hosts import parse_hostfile, parse_hosts
from keras_towers.strategies import STRATEGIES, find


def run(
    script: options.Script,
    arguments: options.Arguments = None,
    processes: options.Processes = None,
    hosts: options.Hosts = None,
    hostfile: options.Hostfile = None,
    ps: options.Ps = None,
    workers: options.Workers = None,
    strategy: options.Strategy = None,
    no_strategy: options.NoStrategy = False,
    towers: options.Towers = None,
    servers: options.Servers = None,
    seed: options.Seed = None,
    module: options.Module = False,
    output: options.Output = None,
    stall_warning: options.StallWarning = settings.STALL_WARNING_S,
    stall_shutdown: options.StallShutdown = settings.STALL_SHUTDOWN_S,
    grace: options.Grace = settings.SCRIPT_GRACE_S,
    network_interface: options.NetworkInterface = None,
    ssh_port: options.SshPort = None,
    verbose: options.Verbose = False,
    min_np: options.MinNp = None,
    max_np: options.MaxNp = None,
    host_discovery_script: options.HostDiscoveryScript = None,
    slots: options.Slots = 1,
    elastic_timeout: options.ElasticTimeout = settings.ELASTIC_TIMEOUT_S,
    blacklist_cooldown_range: options.BlacklistCooldownRange = (5, 600),
    reset_limit: options.ResetLimit = None,
) -> None:
    """Run a script as N processes that train one model together.

    Each line of output is tagged with its rank. If a rank fails, the others are
    stopped, and its exit code is that of the command.

    keras-towers run -np 4 --strategy horovod train.py --epochs 5

    Under srun, mpirun or torchrun it runs the script as one of their processes.
    """
    only_fixed = {
        "-H": hosts,
        "--hostfile": hostfile,
        "--network-interface": network_interface,
        "--ssh-port": ssh_port,
        "--min-np": min_np,
        "--max-np": max_np,
        "--host-discovery-script": host_discovery_script,
    }
    elastic = (min_np, max_np, host_discovery_script) != (None, None, None)
    named = _hosts(hosts, hostfile)
    tasks = _tf_tasks(strategy, ps, workers, processes, only_fixed)
    if tasks:
        processes = sum(tasks.values())
    # Where another launcher started this process, it may be a rank itself.
    rank = None
    if not (elastic or named or tasks):
        rank = rank_to_be(processes)
        if rank is None:
            named = allocated(processes)
    if named and processes is None and not elastic:
        processes = sum(named.values())
    if not elastic and processes is None and rank is None:
        raise TowerError("give the number of processes: -np N")
    _check_script(script, module)
    here = None
    if not (elastic or named or processes or tasks):
        here = tf_config.from_environment()
    served = bool(here.ps if here else tasks and tasks.get("ps"))
    if no_strategy and (strategy or served):
        other = "--strategy" if strategy else "--ps"
        raise TowerError(f"give --no-strategy or {other}, not both")
    member = here or rank
    size = member.size if member else processes
    fitting = None
    if elastic or (size or 1) > 1:
        fitting = _fitting(served, bool(here or tasks), servers)
    if strategy or no_strategy:
        fitting = None
    command = [script, *(arguments or [])]
    program = _program(command, strategy, towers, module, served, fitting)
    known = STRATEGIES.get(strategy or "")
    several = elastic or rank or processes != 1
    if known and known.one_process and several and not here:
        raise TowerError(
            f"the strategy {strategy} works in one process only: use "
            "-np 1, or --strategy horovod"
        )
    servers = _servers(servers, strategy, not (elastic or rank or tasks))
    job = Job(
        command=program,
        ranks=processes or min_np or 0,
        hosts=named or {"localhost": processes or 0},
        interface=None if here else network_interface,
        ssh_port=ssh_port,
        stall_warning_s=stall_warning,
        stall_shutdown_s=stall_shutdown,
        seed=seed,
        output=output,
        grace_s=grace,
        verbose=verbose,
        servers=servers,
        alone=no_strategy,
    )
    if member:
        if output and not here:
            raise TowerError(f"--output is not for {rank}, which has its own")
        become(member, job, seeded=strategy is not None)
    if strategy and seed is None:
        seed = secrets.randbelow(2**31)
    if strategy and (processes or 2) > 1:
        typer.echo(f"keras-towers run: seed {seed}", err=True)
    job = dataclasses.replace(job, seed=seed if strategy else None)
    if tasks:
        code = run_cluster(job, tasks).code
    elif not elastic:
        code = run_job(job).code
    else:
        limits = elastic_options(
            ranks=processes,
            least=min_np,
            most=max_np,
            hosts=named,
            script=host_discovery_script,
            slots=slots,
            timeout_s=elastic_timeout,
            reset_limit=reset_limit,
            cooldown_s=blacklist_cooldown_range,
        )
        code = run_elastic(job, limits)
    raise typer.Exit(code)


def _hosts(hosts: str | None, hostfile: Path | None) -> dict[str, int] | None:
    """Return the slots of the named hosts, None where none are named."""
    if hosts and hostfile:
        raise TowerError("give -H or --hostfile, not both")
    if hostfile:
        return parse_hostfile(hostfile)
    return parse_hosts(hosts) if hosts else None


def _check_script(script: str, module: bool) -> None:
    if module or Path(script).is_file():
        return
    hint = ""
    if Path(script).name.startswith("python"):
        hint = "; give the script itself, without 'python'"
    raise TowerError(f"script not found: {script}{hint}")


def _program(
    command: Sequence[str],
    strategy: str | None,
    towers: int | None,
    module: bool,
    served: bool,
    fitting: str | None,
) -> list[str]:
    """Return the command of a rank; ``fitting``: the strategy to advise."""
    if strategy is None and towers is not None and not served:
        raise TowerError("--towers needs --strategy, or --ps")
    if strategy is None and fitting is None and not served:
        return [sys.executable, *(["-m"] if module else []), *command]
    if strategy is not None:
        find(strategy)
    return [
        *(sys.executable, "-m", "keras_towers.launching.script"),
        *(["--strategy", strategy] if strategy else []),
        *(["--fitting", fitting] if fitting else []),
        *(["--connects"] if served else []),
        *(["--towers", str(towers)] if towers else []),
        *(["--module"] if module else []),
        *command,
    ]


def _fitting(served: bool, on_runtime: bool, servers: int | None) -> str:
    """Return the strategy to advise, by the connection of the processes."""
    if served:
        return "sync-replicas"
    if on_runtime:
        return engines.find("runtime").strategy
    return engines.of_launcher(servers).strategy


def _servers(
    given: int | None, strategy: str | None, fixed: bool
) -> int | None:
    """Return the number of servers beside the ranks, None without them."""
    with_servers = [e for e in engines.ENGINES.values() if e.servers]
    names = [engine.strategy for engine in with_servers]
    if given and strategy not in names and strategy in STRATEGIES:
        raise TowerError(
            f"--servers is for --strategy {' or '.join(names)}: the strategy "
            f"{strategy} has no use for servers"
        )
    servers = given or (1 if strategy in names else None)
    if servers and not fixed:
        raise TowerError(
            "servers are for jobs with a fixed number of processes "
            "that this command starts: give -np, and -H for other machines"
        )
    return servers


def _tf_tasks(
    strategy: str | None,
    ps: int | None,
    workers: int | None,
    processes: int | None,
    others: Mapping[str, object],
) -> dict[str, int] | None:
    """Return the number of tasks of each role, None without the runtime."""
    known = STRATEGIES.get(strategy or "")
    roles = known.roles if known else ()
    if (ps, workers) == (None, None) and (not roles or processes == 1):
        return None
    if known and not roles:
        raise TowerError(
            f"--ps and --workers are not for the strategy {strategy}, whose "
            "processes are connected otherwise: give -np N"
        )
    if known and ps and "ps" not in roles:
        raise TowerError(
            f"the strategy {strategy} has no use for parameter servers: leave "
            "out --ps"
        )
    if "ps" in roles and not ps:
        raise TowerError(
            f"the strategy {strategy} needs parameter servers: --ps 1 "
            f"--workers {workers or processes or 'N'}"
        )
    if processes and (ps or workers):
        raise TowerError(
            "give --workers for the processes that train, instead of -np"
        )
    count = workers or processes
    if not count:
        raise TowerError("give the number of processes that train: --workers N")
    if rank_to_be(None):
        raise TowerError(
            "another launcher started this process as one of several, each of "
            "which would start a cluster: start it once, without that launcher"
        )
    for name, given in others.items():
        if given is not None:
            raise TowerError(
                f"{name} is not for jobs on TensorFlow's own runtime, whose "
                "tasks are started on this machine only. On several machines, "
                "start the script on each with TF_CONFIG"
            )
    return {"ps": ps, "worker": count} if ps else {"worker": count}
