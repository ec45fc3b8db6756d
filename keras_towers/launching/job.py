"""A job with a fixed number of processes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
import signal
import socket
import threading
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from keras_towers import engines, settings
from keras_towers.errors import TowerError
from keras_towers.launching import supervision
from keras_towers.launching.output import Console
from keras_towers.launching.rank_process import RankProcess, check_reachable
from keras_towers.rendezvous import rank_environment, store, tf_config
from keras_towers.rendezvous.hosts import RankPlacement, fill_slots
from keras_towers.rendezvous.network import LOOPBACK, is_local, store_address
from keras_towers.rendezvous.store_server import StoreServer
from keras_towers.rendezvous.tf_config import Cluster
from keras_towers.system import handle_signals

_ON_SERVERS = ("sync-replicas", "SyncReplicasStrategy")
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Job:
    """The options of a job; 0 seconds means never.

    Attributes:
        servers: how many servers of the engine to start; None for an engine
            without servers.
        no_strategy: whether the processes are not meant to be connected.
        restarts: how often to start all processes again if one is lost.
        standby: whether a second process of each rank, which has imported
            TensorFlow, stands by for that.
        runs: what each process runs: a script, or a function, which no option
            puts into a strategy.
    """

    command: list[str]
    ranks: int
    hosts: dict[str, int]
    interface: str | None = None
    stall_warning_s: int = settings.STALL_WARNING_S
    stall_shutdown_s: int = settings.STALL_SHUTDOWN_S
    seed: int | None = None
    output: Path | None = None
    grace_s: int = settings.SCRIPT_GRACE_S
    launcher: str = "keras-towers run"
    servers: int | None = None
    no_strategy: bool = False
    restarts: int = 0
    standby: bool = False
    runs: Literal["script", "function"] = "script"

    def how_to_connect(self, strategy: str, kind: str) -> str:
        """Say how to train one model, by a strategy's name and class."""
        option = f"add --strategy {strategy}, or "
        option = option if self.runs == "script" else ""
        return f"{option}use kt.{kind}() in the {self.runs}"

    def environment(self) -> dict[str, str]:
        """Variables for every process, whichever engine connects them."""
        return rank_environment.process_environment(
            self.stall_warning_s, self.stall_shutdown_s, self.seed
        )


@dataclass(frozen=True)
class RankStart:
    """How a process of a round is started: arguments of a ``RankProcess``."""

    name: str | None
    index: int
    variables: dict[str, str] = dataclasses.field(compare=False)
    host: str = LOOPBACK
    local_size: int = 1
    serves: bool = False

    def run(self, job: RunningJob, variables: dict[str, str]) -> RankProcess:
        """Start the process, with these variables."""
        return RankProcess(
            job,
            self.name,
            self.index,
            variables,
            host=self.host,
            local_size=self.local_size,
            serves=self.serves,
        )


class RunningJob:
    """The console, the store and the processes of a job."""

    def __init__(self, job: Job, hosts: Iterable[str]):
        self.job = job
        remote = [host for host in hosts if not is_local(host)]
        check_reachable(remote)
        self.address, self._interface = store_address(job.interface, remote)
        # RankProcess: it has ended. Connected: a rank has. int: a signal.
        # OSError: output cannot be written.
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.processes: list[RankProcess] = []
        self.logins: dict[str, threading.Semaphore] = collections.defaultdict(
            lambda: threading.Semaphore(settings.LOGINS)
        )
        self._round = 0
        self._starts: list[RankStart] = []
        self._standby: dict[RankStart, RankProcess] = {}
        self.undo = contextlib.ExitStack()
        self.console = Console(job.output, self.events.put, job.launcher)
        self.undo.callback(self.console.close)
        self.server = StoreServer(self.address)
        self.undo.callback(self.server.stop)
        self.server.on_connected = lambda rank, connection: self.events.put(
            supervision.Connected(rank)
        )

    def environment(self, *, elastic: bool = False) -> dict[str, str]:
        """Variables for every process of the job."""
        return rank_environment.job_environment(
            self.server.endpoint,
            self.job.environment(),
            self._interface,
            elastic,
        )

    def __enter__(self) -> Self:
        signals = [
            number
            for number in _HANDLED
            # A job started with nohup keeps ignoring SIGHUP.
            if signal.getsignal(number) != signal.SIG_IGN
        ]
        ended = threading.Event()
        self.undo.callback(ended.set)
        threading.Thread(target=self._beat, args=(ended,), daemon=True).start()
        self.undo.enter_context(
            handle_signals(signals, lambda number, _: self.events.put(number))
        )
        return self

    def _beat(self, ended: threading.Event) -> None:
        """Send heartbeats to the agents on other hosts."""
        while not ended.wait(settings.BEAT_S):
            for process in [*self.processes, *self._standby.values()]:
                if process.host:
                    process.send(0)

    def __exit__(self, *error: object) -> None:
        supervision.end_all([*self.processes, *self._standby.values()])
        self.undo.close()

    def begin_round(self, plan: Sequence[RankPlacement]) -> None:
        """Let ranks meet; the processes of an earlier round have ended."""
        self.processes.clear()
        self._round += 1
        self.server.begin_round(plan)

    def start(self, starts: Sequence[RankStart]) -> None:
        """Start processes, or let those begin that stand by for them."""
        self._starts = list(starts)
        standby, self._standby = self._standby, {}
        for start in starts:
            process = standby.pop(start, None)
            if process is None or process.code is not None:
                start.run(self, start.variables)
                continue
            self.processes.append(process)
            key = store.BEGIN.format(self._round, start.index)
            self.server.put(key, start.variables)
        supervision.end_all(list(standby.values()))

    def stand_by(self) -> None:
        """Start processes that wait for the next round, if there may be one."""
        if not self.job.standby or self._round > self.job.restarts:
            return
        for start in self._starts:
            key = store.BEGIN.format(self._round + 1, start.index)
            variables = {**start.variables, settings.ENV_STANDBY: key}
            process = start.run(self, variables)
            self.processes.remove(process)
            self._standby[start] = process
        self._starts.clear()

    def run_rounds(
        self, run_round: Callable[[], supervision.Outcome]
    ) -> supervision.Outcome:
        """Run the processes, again if one is lost and it may be."""
        outcome = run_round()
        for number in range(1, self.job.restarts + 1):
            if not outcome.lost:
                break
            self.console.say(
                "starting all processes again, for which `fit` with kt.Backup "
                f"goes on where it was (--restarts: {number} of "
                f"{self.job.restarts})"
            )
            supervision.end_all(self.processes)
            outcome = run_round()
        return outcome


def run_job(job: Job) -> supervision.Outcome:
    """Run a job until it ends."""
    engine = engines.engine_of_job(job.servers)
    engine.check_installed()
    plan = fill_slots(job.hosts, job.ranks)
    if len(plan) < job.ranks:
        raise TowerError(
            f"{job.ranks} processes do not fit into the hosts' {len(plan)} "
            "slots: give -H host:slots,... with more slots, or a smaller -np"
        )
    hosts = dict(job.hosts)
    with RunningJob(job, {slot.hostname for slot in plan}) as run:

        def run_round() -> supervision.Outcome:
            outcome = run_ranks(run, engine, fill_slots(hosts, job.ranks))
            lost = filter(supervision.lost_its_host, outcome.lost)
            for host in {rank.host for rank in lost if rank.host}:
                del hosts[host]
            # Without a host there is nowhere to start again.
            lost_ranks = outcome.lost if hosts else ()
            return dataclasses.replace(outcome, lost=lost_ranks)

        return run.run_rounds(run_round)


def run_ranks(
    run: RunningJob, engine: engines.Engine, plan: list[RankPlacement]
) -> supervision.Outcome:
    """Run all ranks of a plan until they end."""
    job, environment = run.job, run.environment()
    run.begin_round(plan)
    servers = None
    if job.servers:
        servers = engine.load(engine.servers)(run, job.servers, plan)
    run.start(
        [
            RankStart(
                str(slot.rank) if job.ranks > 1 else None,
                slot.rank,
                {
                    **environment,
                    **slot.environment,
                    **(servers.environment(slot) if servers else {}),
                },
                slot.hostname,
                slot.local_size,
            )
            # By local rank, so that the logins on all hosts overlap.
            for slot in sorted(plan, key=lambda slot: slot.local_rank)
        ]
    )
    helpers = servers.processes if servers else ()
    return supervision.Supervisor(run, helpers=helpers).wait(
        job.how_to_connect(engine.strategy, engine.strategy_class)
    )


def run_cluster(job: Job, tasks: Mapping[str, int]) -> supervision.Outcome:
    """Run a job on TensorFlow's runtime on this machine, until it ends.

    It ends when all tasks have, except the parameter servers (role ``"ps"``),
    which end by themselves when they notice it.

    Args:
        job: the options of the job.
        tasks: the number of tasks of each role.
    """
    with local_cluster(tasks) as clusters, RunningJob(job, ()) as run:
        return run.run_rounds(lambda: run_tasks(run, clusters))


def run_tasks(run: RunningJob, clusters: list[Cluster]) -> supervision.Outcome:
    """Run all tasks of a cluster until they end.

    Args:
        run: the job.
        clusters: the cluster as each task sees it.
    """
    run.begin_round(())
    common = {
        **run.environment(),
        # This process may be a rank of another job.
        "HOROVOD_RANK": "",
    }
    # Workers need all of a GPU's memory.
    without_gpus = {"CUDA_VISIBLE_DEVICES": "-1"}
    run.start(
        [
            RankStart(
                f"{cluster.role} {cluster.index}",
                cluster.number,
                {
                    **common,
                    tf_config.VARIABLE: cluster.to_json(),
                    **(without_gpus if cluster.role == "ps" else {}),
                },
                local_size=len(clusters),
                serves=cluster.role == "ps",
            )
            for cluster in clusters
        ]
    )
    has_servers = any(cluster.role == "ps" for cluster in clusters)
    runtime = engines.RUNTIME.strategy, engines.RUNTIME.strategy_class
    advised = _ON_SERVERS if has_servers else runtime
    return supervision.Supervisor(run, kind="task").wait(
        run.job.how_to_connect(*advised)
    )


@contextlib.contextmanager
def local_cluster(tasks: Mapping[str, int]) -> Iterator[list[Cluster]]:
    """Reserve free ports of this machine for the tasks of a cluster.

    Inside the block TensorFlow's servers can listen on the ports, also after a
    restart, and no other process is given them.
    """
    with contextlib.ExitStack() as reserved:

        def reserve() -> str:
            holder = reserved.enter_context(socket.socket())
            # TensorFlow sets the same option. With it on both sides, one socket
            # may listen on a port to which another is only bound.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((LOOPBACK, 0))
            return f"{LOOPBACK}:{holder.getsockname()[1]}"

        jobs = {
            role: tuple(reserve() for _ in range(count))
            for role, count in tasks.items()
            if count
        }
        yield [
            Cluster(jobs, role, index)
            for role, addresses in jobs.items()
            for index in range(len(addresses))
        ]
