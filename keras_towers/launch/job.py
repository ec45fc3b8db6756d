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

from keras_towers.errors import TowerError
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

# After the first failure: the others may have something to say too.
_LAST_WORDS_S = 1.0
# As long as all that failed did so because another one had.
_CULPRIT_S = 10.0


@dataclass(frozen=True)
class Job:
    """What to run and how.

    Attributes:
        command: the program and its arguments.
        ranks: number of processes.
        hosts: slots by host.
        interface: the network interface that ranks meet on; None: found out.
        ssh_port: None: what ssh is configured to.
        stall_warning_s: after that a rank says whom it waits for; 0: never.
        stall_shutdown_s: after that such a rank ends the job; 0: never.
        seed: the seed that all ranks start from; None: each its own.
        output: a folder for a file of each rank's output; None: none.
        verbose: say what is started where.
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
    verbose: bool = False


def run_job(job: Job) -> int:
    """Run a job to its end and return the exit code.

    Raises:
        TowerError: it cannot be started.
    """
    plan = assign(job.hosts, job.ranks)
    used = dict.fromkeys(slot.hostname for slot in plan)
    remote = [host for host in used if not is_local(host)]
    check_reachable(remote, job.ssh_port)
    address, interface = meeting_point(job.interface, remote)
    secret = new_secret()
    server = rendezvous_server(address, secret)
    events: queue.SimpleQueue[Rank | int] = queue.SimpleQueue()
    console = Console(job.output, lambda: events.put(int(signal.SIGPIPE)))
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
            return _supervise(ranks, events, console)
    finally:
        end_all(ranks)
        server.stop()
        console.close()


def assign(hosts: dict[str, int], ranks: int) -> list[Any]:
    """Horovod's order of ranks on hosts: a host's slots are filled in turn.

    Raises:
        TowerError: there are more ranks than slots.
    """
    slots = sum(hosts.values())
    if ranks > slots:
        raise TowerError(
            f"{ranks} processes are more than the {slots} slots of the hosts: "
            "give -H host:slots,... more slots, or a smaller -np"
        )
    module = horovod("runner.common.util.hosts")
    infos = [module.HostInfo(host, count) for host, count in hosts.items()]
    return module.get_host_assignments(infos, ranks, ranks)


def meeting_point(
    interface: str | None, remote: list[str]
) -> tuple[str, str | None]:
    """The address to meet at, and the interface of each rank, if known.

    Raises:
        TowerError: the interface is not there, or no way leads to a host.
    """
    network = horovod("runner.util.network")
    if interface:
        try:
            return network.get_driver_ip([interface]), interface
        except (KeyError, RuntimeError):
            names = ", ".join(sorted(network.net_if_addrs()))
            raise TowerError(
                f"no network interface {interface} with an IPv4 address here; "
                f"there are {names}"
            ) from None
    if remote:
        # The name of the interface may be another on every host: each rank's
        # agent looks which one leads here.
        return meeting_address(remote), None
    return LOOPBACK, next(iter(network.get_local_intfs()), None)


@contextlib.contextmanager
def signals_to(events: queue.SimpleQueue[Any]) -> Iterator[None]:
    """Put signals that ask to stop into a queue."""
    before = {
        number: signal.signal(number, lambda n, _: events.put(n))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # A job started with nohup stays without SIGHUP.
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped_by(number: int, console: Console) -> int:
    """The exit code for a signal that the launcher got."""
    if number != signal.SIGPIPE:
        console.say(f"stopped by {signal.Signals(number).name}")
    return 128 + number


def _supervise(
    ranks: list[Rank], events: queue.SimpleQueue[Rank | int], console: Console
) -> int:
    ended: list[Rank] = []
    deadline = math.inf
    while len(ended) < len(ranks):
        try:
            left = max(0, deadline - time.monotonic())
            event = events.get(timeout=None if left == math.inf else left)
        except queue.Empty:
            break
        if isinstance(event, int):
            return stopped_by(event, console)
        ended.append(event)
        found = blame(ended)
        if found:
            patience_s = _LAST_WORDS_S if found.certain else _CULPRIT_S
            deadline = min(deadline, time.monotonic() + patience_s)
    end_all(ranks)
    code, text = verdict(ended, "rank")
    if code:
        console.say(text)
    return code


def verdict(ended: list[Rank], what: str) -> tuple[int, str]:
    """The exit code of a job, and which rank it is from and why.

    Args:
        ended: the ranks that ended, in this order.
        what: what a rank is called.
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
        # Nobody failed on its own, but one left while others went on.
        text += f"; {what} {left[0]} had ended by itself, with exit code 0"
    return rank.code, text


def end_all(ranks: list[Rank]) -> None:
    """End what still runs, and return when it has."""
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
