"""A job with a fixed number of ranks."""

from __future__ import annotations

import collections
import contextlib
import importlib
import queue
import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.launching.byteps import Servers
from keras_towers.launching.output import Console
from keras_towers.launching.ranks import Rank, check_reachable
from keras_towers.launching.supervision import (
    OVER_HOROVOD,
    Connected,
    Outcome,
    end_all,
    supervise,
)
from keras_towers.meeting.addresses import is_local, meeting_point
from keras_towers.meeting.hosts import assign
from keras_towers.meeting.server import StoreServer
from keras_towers.meeting.variables import job_environment, process_environment
from keras_towers.system import handled

_OVER_BYTEPS = "byteps, or use kt.BytePSStrategy()"


@dataclass(frozen=True)
class Job:
    """The options of a job; in seconds, 0 is never."""

    command: list[str]
    ranks: int
    hosts: dict[str, int]
    interface: str | None = None
    ssh_port: int | None = None
    stall_warning_s: int = 30
    stall_shutdown_s: int = 1800
    seed: int | None = None
    output: Path | None = None
    grace_s: int = 30
    verbose: bool = False
    launcher: str = "keras-towers run"
    # Of BytePS; None: without it.
    servers: int | None = None
    # Whether the processes may remain unconnected without a notice.
    alone: bool = False

    def common_environment(self) -> dict[str, str]:
        """Variables for every process, whatever connects them."""
        return process_environment(
            self.stall_warning_s, self.stall_shutdown_s, self.seed
        )


class Running:
    """The console, the store and the processes of a job."""

    def __init__(self, job: Job, hosts: Iterable[str]):
        self.job = job
        remote = [host for host in hosts if not is_local(host)]
        check_reachable(remote, job.ssh_port)
        self.address, self._interface = meeting_point(job.interface, remote)
        # A rank that has ended, Connected, the number of a signal, or the
        # OSError where output cannot be written.
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.processes: list[Rank] = []
        self.logins: dict[str, threading.Semaphore] = collections.defaultdict(
            lambda: threading.Semaphore(settings.LOGINS)
        )
        self.undo = contextlib.ExitStack()
        self.console = Console(job.output, self.events.put, job.launcher)
        self.undo.callback(self.console.close)
        self.server = StoreServer(self.address)
        self.undo.callback(self.server.stop)
        self.server.on_connected = lambda rank, connection: self.events.put(
            Connected(rank)
        )

    def environment(self, *, elastic: bool = False) -> dict[str, str]:
        """Variables for every rank over Horovod or BytePS."""
        common = self.job.common_environment()
        return job_environment(
            self.server.endpoint, common, self._interface, elastic
        )

    def __enter__(self) -> Self:
        signals = [
            number
            for number in (
                *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1),
            )
            # A job started with nohup keeps ignoring SIGHUP.
            if signal.getsignal(number) != signal.SIG_IGN
        ]
        over = threading.Event()
        self.undo.callback(over.set)
        threading.Thread(target=self._beat, args=(over,), daemon=True).start()
        self.undo.enter_context(
            handled(signals, lambda number, _: self.events.put(number))
        )
        return self

    def _beat(self, over: threading.Event) -> None:
        """Give agents on other hosts signs of life."""
        while not over.wait(settings.BEAT_S):
            for rank in [*self.processes]:
                if rank.host:
                    rank.send(0)

    def __exit__(self, *error: object) -> None:
        end_all(self.processes)
        self.undo.close()


def run_job(job: Job) -> Outcome:
    """Run a job until it ends."""
    if not job.servers:
        check_horovod()
    plan = assign(job.hosts, job.ranks)
    if len(plan) < job.ranks:
        raise TowerError(
            f"{job.ranks} processes do not fit into the hosts' {len(plan)} "
            "slots: give -H host:slots,... with more slots, or a smaller -np"
        )
    with Running(job, {slot.hostname for slot in plan}) as run:
        environment = run.environment()
        run.server.begin(plan)
        byteps = Servers(run, job.servers, plan) if job.servers else None
        # The first ones of all hosts log in at the same time.
        for slot in sorted(plan, key=lambda slot: slot.local_rank):
            if job.verbose:
                run.console.say(f"rank {slot.rank} on {slot.hostname}")
            own = {**environment, **slot.environment}
            if byteps:
                own |= byteps.environment(slot)
            Rank(
                run,
                str(slot.rank) if job.ranks > 1 else None,
                slot.rank,
                own,
                host=slot.hostname,
                local_size=slot.local_size,
            )
        return supervise(
            run,
            how_to_connect=_OVER_BYTEPS if byteps else OVER_HOROVOD,
            helpers=byteps.processes if byteps else (),
        )


def check_horovod() -> None:
    """Check that Horovod loads, or every rank would say that it does not."""
    try:
        importlib.import_module("horovod.runner")
    except ImportError as error:
        if (error.name or "").startswith("horovod"):
            reason = "Horovod is not installed in this environment"
        else:
            reason = f"Horovod does not load in this environment ({error})"
        advice = "run `keras-towers install horovod`"
        raise TowerError(f"{reason}: {advice}.") from error
