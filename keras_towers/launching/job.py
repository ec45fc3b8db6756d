"""A job with a fixed number of ranks."""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_towers.launching.byteps import Servers
from keras_towers.launching.elastic_driver import horovod
from keras_towers.launching.ranks import Console, Place, Rank
from keras_towers.launching.ssh import check_reachable
from keras_towers.launching.supervision import (
    OVER_HOROVOD,
    Connected,
    Event,
    Outcome,
    end_all,
    supervise,
)
from keras_towers.meeting.addresses import is_local, meeting_point
from keras_towers.meeting.server import StoreServer
from keras_towers.meeting.slots import assign
from keras_towers.meeting.store import Endpoint
from keras_towers.meeting.variables import job_environment, slot_environment
from keras_towers.system import handled

_OVER_BYTEPS = "byteps, or use kt.BytePSStrategy()"


@dataclass(frozen=True)
class Job:
    """The options of a job.

    Attributes:
        interface: the network interface of the rendezvous; None: detected.
        ssh_port: None: as ssh is configured.
        stall_warning_s: seconds until a waiting rank reports which ranks it
            waits for; 0: never.
        stall_shutdown_s: seconds until a stalled job is ended; 0: never.
        seed: the random seed of all ranks; None: not seeded.
        output: a folder for one output file per rank; None: no files.
        servers: number of BytePS's servers; None: no BytePS.
    """

    command: list[str]
    ranks: int
    hosts: dict[str, int]
    interface: str | None = None
    ssh_port: int | None = None
    stall_warning_s: int = 30
    stall_shutdown_s: int = 600
    seed: int | None = None
    output: Path | None = None
    grace_s: int = 30
    verbose: bool = False
    launcher: str = "keras-towers run"
    servers: int | None = None


class Running:
    """The console, the store and the processes of a job that runs."""

    def __init__(self, job: Job, address: str):
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.console = Console(job.output, self.events.put, job.launcher)
        self.server = StoreServer(
            address, on_connected=lambda rank: self.events.put(Connected(rank))
        )
        self.endpoint: Endpoint = self.server.start()
        self.processes: list[Rank] = []
        self.undo = contextlib.ExitStack()
        self.undo.callback(self.console.close)
        self.undo.callback(self.server.stop)
        self._job = job

    def start(
        self,
        place: Place,
        environment: dict[str, str],
        command: Sequence[str] = (),
    ) -> Rank:
        """Start a process; without a command the job's."""
        rank = Rank(
            place,
            list(command) or self._job.command,
            environment,
            self.console,
            self._job.ssh_port,
            self.events.put,
        )
        self.processes.append(rank)
        return rank

    def end(self) -> None:
        """End all processes, and what they used here."""
        end_all(self.processes)
        self.undo.close()


@contextlib.contextmanager
def running(job: Job, address: str) -> Iterator[Running]:
    """Run the processes that the block starts; its end is theirs."""
    run = Running(job, address)
    try:
        with signals_to(run.events):
            yield run
    finally:
        run.end()


def run_job(job: Job) -> Outcome:
    """Run a job until it ends."""
    if not job.servers:
        horovod("runner")  # Else every rank would say that it is missing.
    plan = assign(job.hosts, job.ranks)
    used = dict.fromkeys(slot.hostname for slot in plan)
    remote = [host for host in used if not is_local(host)]
    check_reachable(remote, job.ssh_port)
    address, interface = meeting_point(job.interface, remote)
    with running(job, address) as run:
        environment = job_environment(
            run.endpoint,
            interface=interface,
            stall_warning_s=job.stall_warning_s,
            stall_shutdown_s=job.stall_shutdown_s,
            seed=job.seed,
        )
        run.server.init(plan)
        byteps = Servers(job.servers, address, plan) if job.servers else None
        helpers = []
        if byteps:
            run.undo.callback(byteps.clean)
            helpers = byteps.start(run.start)
        ranks = []
        for slot in plan:
            place = Place(
                name=str(slot.rank) if job.ranks > 1 else None,
                index=slot.rank,
                host=slot.hostname if slot.hostname in remote else None,
                local_size=slot.local_size,
                rendezvous=address,
            )
            if job.verbose:
                run.console.say(f"rank {slot.rank} on {slot.hostname}")
            own = {**environment, **slot_environment(slot)}
            if byteps:
                own |= byteps.environment(slot)
            ranks.append(run.start(place, own))
        return supervise(
            ranks,
            run.events,
            run.console,
            job.grace_s,
            how_to_connect=_OVER_BYTEPS if byteps else OVER_HOROVOD,
            helpers=helpers,
        )


def signals_to(
    events: queue.SimpleQueue[Any],
) -> contextlib.AbstractContextManager[None]:
    """Put termination signals into a queue, in the main thread only."""
    numbers = [
        number
        for number in (
            *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1),
        )
        # A job started with nohup keeps ignoring SIGHUP.
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    return handled(numbers, lambda n, _: events.put(n))
