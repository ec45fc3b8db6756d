"""A job with a fixed number of ranks."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_towers.errors import EXIT_AGAIN, TowerError
from keras_towers.launch.environment import (
    job_environment,
    slot_environment,
)
from keras_towers.launch.hosts import (
    LOOPBACK,
    check_reachable,
    is_local,
    meeting_address,
)
from keras_towers.launch.outcome import blame, describe
from keras_towers.launch.ranks import GRACE_S, Console, Place, Rank
from keras_towers.launch.rendezvous import horovod, rendezvous_server
from keras_towers.rendezvous import new_secret

# Time for the output of other ranks after the first failure.
_LAST_WORDS_S = 1.0
# Time for the culprit to end while all failures are only consequences.
_CULPRIT_S = 10.0


@dataclass(frozen=True)
class Job:
    """What to run and how.

    Attributes:
        command: the program and its arguments.
        ranks: number of processes.
        hosts: slots by host.
        interface: the network interface of the rendezvous; None: detected.
        ssh_port: None: as ssh is configured.
        stall_warning_s: seconds until a waiting rank reports which ranks it
            waits for; 0: never.
        stall_shutdown_s: seconds until a stalled job is ended; 0: never.
        seed: the random seed of all ranks; None: not seeded.
        output: a folder for one output file per rank; None: no files.
        grace_s: how long a script may take to end after SIGTERM.
        verbose: print which rank is started on which host.
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


@dataclass(frozen=True)
class Connected:
    """A rank has told the others where it is."""

    rank: int


Event = Rank | Connected | int | OSError
"""A rank has ended or connected; or a signal, or why output is not written."""


def run_job(job: Job) -> int:
    """Run a job until it ends and return its exit code.

    Raises:
        TowerError: it cannot be started.
    """
    plan = assign(job.hosts, job.ranks)
    used = dict.fromkeys(slot.hostname for slot in plan)
    remote = [host for host in used if not is_local(host)]
    check_reachable(remote, job.ssh_port)
    address, interface = meeting_point(job.interface, remote)
    secret = new_secret()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    server = rendezvous_server(
        address, secret, lambda rank: events.put(Connected(rank))
    )
    console = Console(job.output, events.put)
    environment = job_environment(
        rendezvous=address,
        port=server.start(),
        secret=secret,
        interface=interface,
        stall_warning_s=job.stall_warning_s,
        stall_shutdown_s=job.stall_shutdown_s,
        seed=job.seed,
        elastic=False,
    )
    server.init(plan)
    ranks: list[Rank] = []
    try:
        with signals_to(events):
            for slot in plan:
                place = Place(
                    name=str(slot.rank) if job.ranks > 1 else None,
                    index=slot.rank,
                    host=slot.hostname if slot.hostname in remote else None,
                    local_size=slot.local_size,
                    rendezvous=address,
                )
                if job.verbose:
                    console.say(f"rank {slot.rank} on {slot.hostname}")
                own = {**environment, **slot_environment(slot)}
                ranks.append(
                    Rank(
                        place,
                        job.command,
                        own,
                        console,
                        job.ssh_port,
                        events.put,
                    )
                )
            return _supervise(ranks, events, console, job.grace_s)
    finally:
        end_all(ranks)
        server.stop()
        console.close()


def assign(hosts: dict[str, int], ranks: int) -> list[Any]:
    """Assign ranks to hosts as Horovod does: fill one host after another.

    Raises:
        TowerError: there are more ranks than slots.
    """
    slots = sum(hosts.values())
    if ranks > slots:
        raise TowerError(
            f"{ranks} processes do not fit into the hosts' {slots} slots: "
            "give -H host:slots,... with more slots, or a smaller -np"
        )
    module = horovod("runner.common.util.hosts")
    infos = [module.HostInfo(host, count) for host, count in hosts.items()]
    return module.get_host_assignments(infos, ranks, ranks)


def meeting_point(
    interface: str | None, remote: list[str]
) -> tuple[str, str | None]:
    """The rendezvous address, and the interface of each rank if known.

    Raises:
        TowerError: the interface does not exist, or a host has no route.
    """
    network = horovod("runner.util.network")
    if interface:
        try:
            return network.get_driver_ip([interface]), interface
        except (KeyError, RuntimeError):
            names = ", ".join(sorted(network.net_if_addrs()))
            raise TowerError(
                f"there is no network interface {interface} with an IPv4 "
                f"address here; choose from {names}"
            ) from None
    if remote:
        # Interface names differ between hosts: each rank's agent looks up the
        # one with a route to this machine.
        return meeting_address(remote), None
    return LOOPBACK, next(iter(network.get_local_intfs()), None)


@contextlib.contextmanager
def signals_to(events: queue.SimpleQueue[Any]) -> Iterator[None]:
    """Put termination signals into a queue."""
    before = {
        number: signal.signal(number, lambda n, _: events.put(n))
        for number in (
            *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1),
        )
        # A job started with nohup keeps ignoring SIGHUP.
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped_by(reason: int | OSError, console: Console) -> int:
    """The exit code of a job that the launcher had to end.

    Args:
        reason: a signal, or why the ranks' output cannot be written.
        console: where it is said.
    """
    if isinstance(reason, BrokenPipeError):
        # As programs in a pipeline end when the next one has.
        return 128 + signal.SIGPIPE
    if isinstance(reason, OSError):
        console.say(
            f"ended, because the output of the job cannot be written to "
            f"{reason.filename}: {reason.strerror}"
        )
        return 1
    console.say(f"stopped by {signal.Signals(reason).name}")
    return 128 + reason


def _supervise(
    ranks: list[Rank],
    events: queue.SimpleQueue[Event],
    console: Console,
    grace_s: float,
) -> int:
    ended: list[Rank] = []
    connected: set[int] = set()
    passed_on = 0
    deadline = math.inf
    while len(ended) < len(ranks):
        try:
            left_s = max(0, deadline - time.monotonic())
            event = events.get(timeout=None if left_s == math.inf else left_s)
        except queue.Empty:
            break
        if event in (signal.SIGTERM, signal.SIGUSR1) and not passed_on:
            passed_on = event
            for rank in ranks:
                rank.send(event)
            if event == signal.SIGTERM:
                deadline = min(deadline, time.monotonic() + grace_s)
            continue
        if isinstance(event, int | OSError):
            return stopped_by(event, console)
        if isinstance(event, Connected):
            connected.add(event.rank)
        else:
            ended.append(event)
        left = [
            r for r in ended if not r.code and r.place.index not in connected
        ]
        if left and connected:
            # It would wait until Horovod gives up, for minutes.
            console.say(
                f"rank {left[0].place.name} ended with exit code 0 before it "
                f"connected, and rank {min(connected)} waits for it"
            )
            return 1
        found = blame(ended)
        if found:
            patience_s = _LAST_WORDS_S if found.certain else _CULPRIT_S
            deadline = min(deadline, time.monotonic() + patience_s)
    end_all(ranks)
    code, text = verdict(ended, "rank")
    if passed_on and any(rank.code == EXIT_AGAIN for rank in ended):
        console.say(
            f"ended by {signal.Signals(passed_on).name}; started again, the "
            f"script goes on (exit code {EXIT_AGAIN})"
        )
        return EXIT_AGAIN
    if passed_on == signal.SIGTERM:
        return stopped_by(passed_on, console)
    if code:
        console.say(text)
    elif len(ranks) > 1 and not connected:
        console.say(
            f"the {len(ranks)} processes never connected: each ran the script "
            "by itself. To train one model in all of them, add --strategy "
            "horovod, or use kt.HorovodStrategy() in the script"
        )
    return code


def verdict(ended: list[Rank], what: str) -> tuple[int, str]:
    """The exit code of a job, and which rank failed and why.

    Args:
        ended: the ranks in the order in which they ended.
        what: the word for a rank in the message.
    """
    found = blame(ended)
    if found is None:
        return 0, ""
    rank = ended[found.rank]
    assert rank.code
    name = f"{what} {rank.place.name}" if rank.place.name else "the script"
    text = describe(name, rank.code, rank.place.host, bool(rank.tail()))
    left = [other.place.name for other in ended if other.code == 0]
    if not found.certain and left:
        # No rank failed by itself, but one ended early.
        text += f"; {what} {left[0]} had already ended with exit code 0"
    return rank.code, text


def end_all(ranks: list[Rank]) -> None:
    """End all running ranks and wait for them."""
    running = [rank for rank in ranks if rank.code is None]
    for rank in running:
        rank.stop()
    until = time.monotonic() + 2 * GRACE_S + 2
    while any(rank.code is None for rank in running):
        if time.monotonic() > until:
            for rank in running:
                rank.kill()
            return
        time.sleep(0.02)
