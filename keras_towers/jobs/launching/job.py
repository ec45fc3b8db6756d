"""A job, in rounds: a round ends with its processes, and another may follow.

Between two rounds, processes may have been lost, and hosts may come and go
(``elastic_hosts.py``).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from keras_towers.foundation import settings
from keras_towers.foundation.system import (
    absolute,
    allow_open_files,
    handle_signals,
    make_writable,
    working_folder,
)
from keras_towers.jobs import known_engines
from keras_towers.jobs.known_engines import Engine
from keras_towers.jobs.launching.elastic_hosts import (
    THIS_MACHINE,
    ElasticOptions,
)
from keras_towers.jobs.launching.outcome import (
    Connected,
    Outcome,
    end_all,
    failed_by_themselves,
)
from keras_towers.jobs.launching.output import Console
from keras_towers.jobs.launching.rank_process import (
    ProcessContext,
    RankProcess,
    RankStart,
    check_reachable,
)
from keras_towers.jobs.rendezvous import rank_environment, store
from keras_towers.jobs.rendezvous.hosts import RankPlacement
from keras_towers.jobs.rendezvous.network import (
    LOOPBACK,
    is_local,
    store_address,
)
from keras_towers.jobs.rendezvous.store_server import StoreServer

# Three pipes, a file of its output, its connection to the store, and one more
# while it makes another one.
_FILES_PER_PROCESS = 6
_OTHER_FILES = 200
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Job:
    """The options of a job; 0 seconds means never.

    Attributes:
        engine: what connects the processes.
        servers: how many servers of the engine to start; None: none.
        no_strategy: whether the processes are not meant to be connected.
        elastic: how their number may change; None: it is fixed.
        restarts: the largest number of times to start all processes again if
            one is lost, or if hosts come and go; None: without a limit.
        commits: where to make the folder in which scripts commit for that;
            None: among temporary files of this machine, or on several hosts in
            the working folder.
        standby: whether a second process of each rank, which has imported
            TensorFlow, stands by for that.
        device_memory: the memory of each device, as text; None: that of GPUs.
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
    engine: Engine = known_engines.HOROVOD
    servers: int | None = None
    no_strategy: bool = False
    elastic: ElasticOptions | None = None
    restarts: int | None = 0
    commits: Path | None = None
    standby: bool = False
    device_memory: str | None = None
    runs: Literal["script", "function"] = "script"

    def how_to_connect(self, strategy: str, kind: str) -> str:
        """Say how to train one model, by a strategy's name and class."""
        option = f"add --strategy {strategy}, or "
        option = option if self.runs == "script" else ""
        return f"{option}use kt.{kind}() in the {self.runs}"

    def environment(self) -> dict[str, str]:
        """Variables for every process, whichever engine connects them."""
        return rank_environment.process_environment(
            self.stall_warning_s,
            self.stall_shutdown_s,
            self.seed,
            self.device_memory,
        )


class RunningJob(ProcessContext):
    """The console, the store and the processes of a job."""

    def __init__(self, job: Job, hosts: Iterable[str]):
        self.job, self.command = job, job.command
        remote = [host for host in hosts if not is_local(host)]
        check_reachable(remote)
        self.address, self._interface = store_address(job.interface, remote)
        # Other hosts could not reach the store of a later round.
        local = self.address == LOOPBACK and not remote
        self._stays_here = local and job.restarts != 0
        self._left_out: set[str] = set()
        # RankProcess: it has ended. Connected: a rank has. HostsChanged: others
        # are there. int: a signal. OSError: output cannot be written.
        self.events = queue.SimpleQueue()
        self.processes = []
        self.logins = collections.defaultdict(
            lambda: threading.Semaphore(settings.LOGINS)
        )
        self.round: int = 0
        # The last backup when a failure was taken for a transient one.
        self._tried: Any = None
        self._starts: list[RankStart] = []
        self._standby: dict[RankStart, RankProcess] = {}
        self.undo = contextlib.ExitStack()
        self.undo.callback(
            resource.setrlimit,
            resource.RLIMIT_NOFILE,
            resource.getrlimit(resource.RLIMIT_NOFILE),
        )
        self.console = Console(job.output, self.events.put, job.launcher)
        self.undo.callback(self.console.close)
        self.server = StoreServer(self.address)
        self.undo.callback(self.server.stop)
        self.server.on_connected = lambda rank: self.events.put(Connected(rank))
        self._commits: Path | None = None
        if job.restarts != 0:
            self._commits = self._make_commit_folder(remote)

    def _make_commit_folder(self, remote: Collection[str]) -> Path:
        """Make a folder that ranks commit to, and that ends with the job."""
        parent, elastic = self.job.commits, self.job.elastic
        if not parent and (remote or (elastic and elastic.script)):
            # Hosts that are found later have the working folder, too.
            parent = working_folder()
        if parent:
            parent = absolute(parent)
            make_writable(parent, "name another folder with --commits.")
        folder = Path(tempfile.mkdtemp("", ".keras-towers-", parent))
        self.undo.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    @property
    def may_restart(self) -> bool:
        """Whether another round may follow this one."""
        limit = self.job.restarts
        return limit is None or self.round <= limit

    def within_reach(self, hosts: dict[str, int]) -> dict[str, int]:
        """Leave out the hosts that could not take part in the job."""
        if not self._stays_here:
            return hosts
        here = {name: n for name, n in hosts.items() if name == THIS_MACHINE}
        others = hosts.keys() - here.keys() - self._left_out
        if others:
            self._left_out |= others
            self.console.say(
                f"no rank starts on {', '.join(sorted(others))}: the job "
                "began on this machine alone, and listens only on loopback. "
                "To let other hosts join, start it with --network-interface"
            )
        return here

    @property
    def backup_ends_with_job(self) -> bool:
        """Whether the last backup is in the job's own folder of commits."""
        last = self.server.get(store.COMMITTED)
        if not last or not self._commits:
            return False
        return Path(last[0]).is_relative_to(self._commits)

    def environment(self) -> dict[str, str]:
        """Variables for every process of the job."""
        environment = self.job.environment()
        if self._commits:
            environment[settings.ENV_COMMITS] = str(self._commits)
        return rank_environment.job_environment(
            self.server.endpoint, environment, self._interface
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
        """Send agents on other hosts heartbeats; let stopped ones go on."""
        while not ended.wait(settings.BEAT_S):
            for process in [*self.processes, *self._standby.values()]:
                if process.host:
                    process.send(0)
                if process.code is None and process.resume():
                    self.console.say(
                        f"the agent of rank {process.name or 0} was stopped "
                        "(SIGSTOP), and goes on"
                    )

    def __exit__(self, *error: object) -> None:
        end_all([*self.processes, *self._standby.values()])
        self.undo.close()

    def begin_round(self, plan: Sequence[RankPlacement]) -> None:
        """Let ranks meet; the processes of an earlier round have ended."""
        self.processes.clear()
        self.round += 1
        self.server.begin_round(plan)

    def start(self, starts: Sequence[RankStart]) -> None:
        """Start processes, or let those begin that stand by for them."""
        self._starts = list(starts)
        self._allow_open_files()
        standby, self._standby = self._standby, {}
        for start in starts:
            process = standby.pop(start, None)
            if process is None or process.code is not None:
                RankProcess(self, start)
                continue
            self.processes.append(process)
            key = store.BEGIN.format(self.round, start.index)
            self.server.put(key, start.variables)
        end_all(list(standby.values()))

    def _allow_open_files(self) -> None:
        """Let this process have the files of all processes open."""
        number = len(self.processes) + len(self._starts)
        files = _FILES_PER_PROCESS * number * (2 if self.job.standby else 1)
        too_few = allow_open_files(_OTHER_FILES + files, f"{number} processes")
        if too_few:
            self.console.say(too_few)

    def stand_by(self) -> None:
        """Start processes that wait for the next round, if there may be one."""
        if not (self.job.standby and self.may_restart):
            return
        for start in self._starts:
            key = store.BEGIN.format(self.round + 1, start.index)
            variables = {**start.variables, settings.ENV_STANDBY: key}
            waiting = dataclasses.replace(start, variables=variables)
            process = RankProcess(self, waiting)
            self.processes.remove(process)
            self._standby[start] = process
        self._starts.clear()

    def run_rounds(self, run_round: Callable[[], Outcome]) -> Outcome:
        """Run rounds until one ends after which the job cannot go on."""
        committed, first_idle_round = None, 1
        while True:
            outcome = run_round()
            before, committed = committed, self.server.get(store.COMMITTED)
            if committed != before:
                first_idle_round = self.round
            may_go_on = bool(outcome.lost) or self._may_be_transient(outcome)
            if not may_go_on or self.job.restarts == 0:
                return outcome
            limit = self.job.restarts
            option = "--reset-limit" if self.job.elastic else "--restarts"
            if not self.may_restart:
                self.console.say(
                    f"it has started again {limit} times already ({option})"
                )
                return outcome
            idle = self.round - first_idle_round + 1
            if limit is None and idle >= settings.IDLE_ROUNDS:
                self.console.say(
                    f"it has been lost {idle} times without a backup in between"
                )
                return outcome
            begin = "from the last backup"
            if not committed:
                begin = (
                    "from the beginning, since there is no backup (kt.Backup, "
                    "kt.elastic)"
                )
            if limit is not None:
                begin += f" ({option}: {self.round} of {limit})"
            self.console.say(f"starting all processes again, {begin}")
            end_all(self.processes)

    def _may_be_transient(self, outcome: Outcome) -> bool:
        """Whether a failure may not be of the script, but of a link or host.

        It is not tried twice without a backup in between.
        """
        cause = outcome.cause
        if not isinstance(cause, RankProcess):
            return False
        failed = failed_by_themselves(self.processes)
        everywhere = {rank.hostname for rank in self.processes}
        hosts = {rank.hostname for rank in failed}
        if hosts and not (self.job.elastic and hosts < everywhere):
            return False
        committed = self.server.get(store.COMMITTED)
        if committed == self._tried:
            return False
        self._tried = committed
        return True
