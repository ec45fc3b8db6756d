"""``keras-towers run``: start a script as the ranks of a distributed job."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import typer

from keras_towers.cli.launch_plan import LaunchPlan, choose_engine, make_plan
from keras_towers.cli.run_options import RunOptions
from keras_towers.foundation import settings
from keras_towers.foundation.byte_sizes import parse_bytes
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.launching.elastic_hosts import ElasticOptions
from keras_towers.jobs.launching.job import Job
from keras_towers.jobs.launching.rank_job import run_job
from keras_towers.jobs.launching.script import Setup, check_script
from keras_towers.jobs.rendezvous import launchers, tf_config
from keras_towers.jobs.rendezvous.rank_environment import INTERFACE, seconds
from keras_towers.jobs.rendezvous.tf_config import Member
from keras_towers.strategies import STRATEGIES, check_options, find, parse


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
    plan = make_plan(given, choose_engine(given, strategy))
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
    command = setup.command(given.script, *(given.arguments or []))
    job = _job_of(given, plan, command)
    if strategy:
        job = dataclasses.replace(job, seed=_seed(given.seed, plan.joined))
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


def _job_of(given: RunOptions, plan: LaunchPlan, command: list[str]) -> Job:
    """Return the job of a plan, without a seed."""
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
    return Job(
        command=command,
        ranks=plan.ranks,
        hosts=plan.hosts or {"localhost": plan.ranks},
        interface=given.network_interface,
        stall_warning_s=given.stall_warning,
        stall_shutdown_s=given.stall_shutdown,
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
