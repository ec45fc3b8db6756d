"""A job whose ranks may leave and join, in rounds.

A round ends when each worker has ended or asks for another round. The next one
has a worker in every slot, and rank 0 in a slot whose worker has the state of
the training. ``ElasticHosts`` knows the slots, ``ElasticRounds`` gives workers
their ranks, ``ElasticDriver`` decides which workers run, and on which hosts.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_towers import commands, engines, settings
from keras_towers.errors import TowerError
from keras_towers.launching.job import Job, RunningJob
from keras_towers.launching.rank_process import RankProcess, signal_name
from keras_towers.launching.supervision import end_all, report_stop, verdict
from keras_towers.rendezvous.hosts import (
    RankPlacement,
    fill_slots,
    read_entries,
)
from keras_towers.rendezvous.network import is_local
from keras_towers.rendezvous.store import HOSTS_UPDATED

_LOCAL_SLOT = "127.0.0."
"""A slot of this machine is a host of this name, followed by 1, 2, ..."""
# HostUpdateResult.mixed of horovod.runner.elastic.worker.
_ADDED_OR_REMOVED = 3


def discover_by_script(script: Path) -> dict[str, int]:
    """Run a script, and read the hosts and their slots that it prints.

    Horovod's own version starts two Python processes for every query, once a
    second.
    """
    try:
        result = commands.run_command(
            [str(script.absolute())], settings.DISCOVERY_S
        )
    except OSError as error:
        raise TowerError(
            f"the host discovery script {script} cannot be run "
            f"({error.strerror}): it has to be an executable file"
        ) from None
    if result.code != 0:
        raise TowerError(
            f"the host discovery script {script} "
            f"{result.reason(settings.DISCOVERY_S)}"
        )
    entries = [*filter(str.strip, result.stdout.splitlines())]
    form = (
        f"the host discovery script {script} has to print lines like "
        "'host:2' or 'host'"
    )
    # An empty list is no error: hosts may appear later.
    return read_entries(entries, form) if entries else {}


def split_this_machine(found: dict[str, int]) -> dict[str, int]:
    """Make each slot of this machine a separate host.

    A worker that fails makes the job avoid its host, including all workers on
    it. If this machine were the only host, the job would end.
    """
    hosts: dict[str, int] = {}
    numbers = itertools.count(1)
    for host, count in found.items():
        if _is_here(host):
            for _ in range(count):
                hosts[f"{_LOCAL_SLOT}{next(numbers)}"] = 1
        else:
            hosts[host] = count
    return hosts


# Hosts are discovered once a second.
_is_here = functools.cache(is_local)


class ElasticHosts:
    """The hosts of an elastic job, those known longest first.

    Args:
        discover: returns the number of slots of each host.
        found: the last result of ``discover``.
        cooldown_s: the shortest and longest time to avoid a host. The time is
            the shortest at first, and doubles with each failure on it.
        say: writes a message.
    """

    def __init__(
        self,
        discover: Callable[[], dict[str, int]],
        found: dict[str, int],
        cooldown_s: tuple[int, int],
        say: Callable[[str], None],
    ):
        self._discover = discover
        self._cooldown_s = cooldown_s
        self._say = say
        self._last_error = ""
        self._found = found
        self._known: list[str] = []
        self._failures: collections.Counter[str] = collections.Counter()
        self._avoided_until: dict[str, float] = {}

    def discover(self) -> None:
        """Discover hosts; if that fails, keep the known ones."""
        try:
            self._found, self._last_error = self._discover(), ""
        except TowerError as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                self._say(f"{error}; going on with the hosts found before")

    def avoid(self, host: str) -> None:
        """Avoid a host for a while, because a worker has failed there."""
        shortest, longest = self._cooldown_s
        pause_s = min(longest, shortest * 2 ** self._failures[host])
        self._failures[host] += 1
        self._avoided_until[host] = time.monotonic() + pause_s
        self._say(
            f"no worker on {host} for {pause_s} s, as one has failed there "
            "(--blacklist-cooldown-range)"
        )
        self.available()

    @property
    def local_slots(self) -> int:
        """The number of slots of this machine, including avoided ones."""
        return sum(host.startswith(_LOCAL_SLOT) for host in self._found)

    def available(self) -> dict[str, int]:
        """The number of slots of each host that is not avoided."""
        now = time.monotonic()
        found = {
            host: count
            for host, count in self._found.items()
            if self._avoided_until.get(host, 0) <= now
        }
        known = dict.fromkeys((*self._known, *found))
        self._known = [host for host in known if host in found]
        return {host: found[host] for host in self._known}


class ElasticRounds:
    """Gives each worker its rank once all workers of the round have arrived.

    Horovod's C++ code ends a rank that cannot reach another one while it
    connects. So no worker gets a rank before all workers have asked for theirs.

    Args:
        on_leave: called when a worker that has a rank asks for another round.

    Attributes:
        plan: the placement of each worker of the round, by its key.
        ended: the workers of the round whose processes have ended.
    """

    def __init__(self, on_leave: Callable[[], None]):
        self._on_leave = on_leave
        self._lock = threading.Lock()
        self._number = 0
        self.plan: dict[str, RankPlacement] = {}
        self.ended: list[str] = []
        self._left: set[str] = set()
        self._arrived: dict[str, socket.socket] = {}
        self._informed: set[str] = set()

    def begin_round(self, plan: Sequence[RankPlacement]) -> None:
        """Begin a round."""
        with self._lock:
            self._number += 1
            self.plan = {slot.key: slot for slot in plan}
            self.ended, self._left = [], set()
            self._arrived, self._informed = {}, set()

    def record_end(self, key: str) -> None:
        """Record that the process of a worker has ended."""
        with self._lock:
            if key in self.plan:
                self.ended.append(key)

    @property
    def met(self) -> bool:
        """Whether all workers of the round have arrived."""
        with self._lock:
            return bool(self._informed)

    @property
    def over(self) -> bool:
        """Whether every worker has ended or asks for another round."""
        with self._lock:
            return self.plan.keys() <= {*self.ended, *self._left}

    def place_worker(
        self, key: str, connection: socket.socket
    ) -> RankPlacement | None:
        """Wait for all workers; return the worker's placement, if it has one.

        Args:
            key: the worker's key in the plan.
            connection: over which the worker asks.
        """
        left_round = 0
        while not _is_closed(connection):
            with self._lock:
                if key not in self.plan:
                    return None
                if self._number != left_round:
                    if key in self._informed or self.ended:
                        self._left.add(key)
                        left_round = self._number
                        self._on_leave()
                    elif self._arrive(key, connection):
                        return self.plan[key]
            time.sleep(settings.POLL_S)
        return None

    def hold_worker(self, rank: int, connection: socket.socket) -> None:
        """Wait for all workers, for one that uses the rank it started with."""
        # A script that initializes Horovod by itself connects without asking.
        number = self._number
        key = next((k for k, s in self.plan.items() if s.rank == rank), None)
        while key and not _is_closed(connection):
            with self._lock:
                over = number != self._number or self.ended
                if (
                    over
                    or key in self._informed
                    or self._arrive(key, connection)
                ):
                    return
            time.sleep(settings.POLL_S)

    def _arrive(self, key: str, connection: socket.socket) -> bool:
        """Record a worker's arrival; return whether its round is complete."""
        self._arrived[key] = connection
        if not self._informed and (
            self._arrived.keys() != self.plan.keys()
            or any(map(_is_closed, self._arrived.values()))
        ):
            return False
        self._informed.add(key)
        return True


def _is_closed(connection: socket.socket) -> bool:
    """Whether the worker at the other end is gone, usually killed."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True


@dataclass(frozen=True)
class ElasticOptions:
    """How a job may shrink and grow.

    Attributes:
        ranks: the number of ranks at the start.
        min_ranks: the smallest number with which the job goes on.
        max_ranks: the largest number; None: the number of slots.
        hosts: the number of slots of each host; None: this machine.
        script: a program that prints the hosts instead.
        cooldown_s: the shortest and longest time to avoid a host.
        timeout_s: how long to wait for slots.
        reset_limit: how often ranks may leave or join; None: no limit.

    Raises:
        TowerError: the options contradict each other.
    """

    ranks: int
    min_ranks: int
    max_ranks: int | None
    hosts: dict[str, int] | None = None
    script: Path | None = None
    cooldown_s: tuple[int, int] = settings.ELASTIC_COOLDOWN_S
    timeout_s: int = settings.ELASTIC_TIMEOUT_S
    reset_limit: int | None = None

    def __post_init__(self) -> None:
        least, most = self.min_ranks, self.max_ranks or self.ranks
        if not least:
            raise TowerError("an elastic job needs --min-np or -np")
        if not least <= self.ranks <= most:
            raise TowerError(
                f"--min-np {least}, -np {self.ranks} and --max-np {most} have "
                "to be in this order, smallest first"
            )
        shortest, longest = self.cooldown_s
        if not 1 <= shortest <= longest <= 3600:
            raise TowerError(
                "--blacklist-cooldown-range takes two numbers of seconds from "
                f"1 to 3600, smaller one first, not {shortest} {longest}"
            )
        if self.script and self.hosts:
            raise TowerError("give --host-discovery-script or hosts, not both")
        hosts = self.hosts or {}
        count = sum(hosts.values())
        if hosts and self.ranks > count:
            raise TowerError(
                f"{self.ranks} processes are more than the {count} slots of "
                "the hosts"
            )
        if len(hosts) == 1 and not any(map(is_local, hosts)):
            raise TowerError(
                "an elastic job on other machines needs at least two of them: "
                "a host is given up when a worker on it fails"
            )

    def discover(self) -> dict[str, int]:
        """The number of slots of each host."""
        if self.script:
            return split_this_machine(discover_by_script(self.script))
        this_machine = {"localhost": self.max_ranks or self.ranks}
        return split_this_machine(self.hosts or this_machine)


def run_elastic(job: Job, options: ElasticOptions) -> int:
    """Run an elastic job to its end and return the exit code."""
    engines.engine_of_job(None).check_installed()
    hosts = options.discover()
    with RunningJob(job, hosts) as run:
        return ElasticDriver(run, options, hosts).drive()


class _JobEnded(Exception):
    """Ends the rounds of a job, with its exit code."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class ElasticDriver:
    """Decides which workers run, and on which hosts, from round to round."""

    def __init__(
        self, run: RunningJob, options: ElasticOptions, hosts: dict[str, int]
    ) -> None:
        self._run, self._options = run, options
        self._environment = run.environment(elastic=True)
        self._say = run.console.say
        self.hosts = ElasticHosts(
            options.discover, hosts, options.cooldown_s, self._say
        )
        self.rounds = ElasticRounds(lambda: run.events.put(None))
        run.server.place_worker = self.rounds.place_worker
        run.server.on_connected = self.rounds.hold_worker
        self.workers: dict[str, RankProcess] = {}
        self._offered: dict[str, int] = {}
        self._short_since: float | None = None

    def drive(self) -> int:
        """Run workers until the job ends, and return its exit code."""
        over = threading.Event()
        self._run.undo.callback(over.set)
        threading.Thread(
            target=self._discover, args=(over,), daemon=True
        ).start()
        ranks, least = self._options.ranks, self._options.min_ranks
        wanted, option = ranks, "-np" if ranks > least else "--min-np"
        changes = 0
        try:
            while True:
                self._begin_round(self._wait_for_slots(wanted, option))
                while not self.rounds.over:
                    self._announce_hosts()
                    self._handle_event()
                self._end_round(changes)
                wanted, option = least, "--min-np"
                changes += 1
        except _JobEnded as end:
            return end.code

    def _discover(self, over: threading.Event) -> None:
        while not over.wait(settings.DISCOVERY_PAUSE_S):
            self.hosts.discover()
            self._run.events.put(None)

    def _handle_event(self) -> None:
        """Handle the next event; discovery makes one every second."""
        event = self._run.events.get()
        if isinstance(event, int | OSError):
            raise _JobEnded(report_stop(event, self._run.console))
        if isinstance(event, RankProcess):
            if event.code and not event.stopped:
                self._say(verdict([event], "worker").text)
            for key, worker in self.workers.items():
                if worker is event:
                    self.rounds.record_end(key)

    def _end_round(self, changes: int) -> None:
        """Avoid the hosts of failed workers, or end the job."""
        plan, ended = self.rounds.plan, self.rounds.ended
        workers = [self.workers.get(key) for key in ended]
        finished = any(worker and worker.code == 0 for worker in workers)
        if finished or len(ended) == len(plan):
            raise _JobEnded(self.end_and_report())
        failed = {plan[key].hostname for key in ended}
        for host in failed:
            self.hosts.avoid(host)
        given_up = [k for k, slot in plan.items() if slot.hostname in failed]
        end_all([self.workers[k] for k in given_up if k in self.workers])
        if len(given_up) == len(plan):
            raise _JobEnded(self.end_and_report())
        limit = self._options.reset_limit
        if limit is not None and changes >= limit:
            self._say(
                f"ranks left or joined over {limit} times (--reset-limit)"
            )
            raise _JobEnded(1)

    def end_and_report(self) -> int:
        """End all workers; report the cause and return the exit code."""
        end_all(self._run.processes)
        plan = self.rounds.plan
        keys = dict.fromkeys((*self.rounds.ended, *plan))
        ended = {k: self.workers[k] for k in keys if k in self.workers}
        outcome = verdict(list(ended.values()), "worker")
        code, text = outcome.code, outcome.text
        succeeded = [key for key, worker in ended.items() if worker.code == 0]
        killed = all(signal_name(w.code) for w in ended.values() if w.code)
        enough = len(succeeded) >= self._options.min_ranks
        if killed and enough and next(iter(plan)) in succeeded:
            # Workers may be lost after the training, as they may be during it.
            return 0
        if not ended:
            code, text = 1, "no worker could be started"
        if signal_name(code):
            text += ", and no worker is left that has the training's state"
        if code:
            self._say(text)
        return code

    def _wait_for_slots(self, wanted: int, option: str) -> dict[str, int]:
        """Wait for enough slots; return the number on each host."""
        if self._short_since is None or self.rounds.met:
            # A round in which workers could not start does not count.
            self._short_since = time.monotonic()
        limit_s, reported = self._options.timeout_s, False
        while True:
            hosts = self.hosts.available()
            found = sum(hosts.values())
            if found >= wanted:
                return hosts
            if time.monotonic() >= self._short_since + limit_s:
                break
            if not reported:
                reported = True
                self._say(
                    f"slots for workers: {found}, {option} asks for {wanted}; "
                    f"waiting for more, for {limit_s} s at most "
                    "(--elastic-timeout)"
                )
            self._handle_event()
        text = (
            f"there were not {wanted} slots within {limit_s} s: add hosts, or "
            "give a smaller --min-np or a longer --elastic-timeout"
        )
        if not self.rounds.plan:
            raise TowerError(text)
        self._say(text)
        raise _JobEnded(1)

    def _begin_round(self, hosts: dict[str, int]) -> None:
        """Start a worker in each empty slot, and let all workers meet."""
        plan = fill_slots(hosts, self._options.max_ranks)
        chief = self.workers.get(plan[0].key)
        if self.rounds.plan and (chief is None or chief.code is not None):
            self._say("no host is left that has the state of the training")
            raise _JobEnded(1)
        self._offered = hosts
        self._run.server.begin_round(plan)
        self.rounds.begin_round(plan)
        for key, worker in self.workers.items():
            if worker.code is None and key not in self.rounds.plan:
                self._say(f"worker {worker.name} leaves, as its host has left")
                worker.stop()
        for slot in plan:
            old = self.workers.get(slot.key)
            if old is None or old.code is not None:
                self._start(slot)

    def _start(self, slot: RankPlacement) -> None:
        taken = {rank.index for rank in self._run.processes}
        # Its rank, unless an earlier worker has that number: a worker keeps its
        # number when its rank changes.
        number = slot.rank if slot.rank not in taken else max(taken) + 1
        if slot.rank in taken:
            self._say(
                f"worker {number} on {slot.hostname}: rank {slot.rank} of "
                f"{slot.size}"
            )
        key, sharing = slot.key, slot.local_size
        variables = {**self._environment, **slot.environment}
        if slot.hostname.startswith(_LOCAL_SLOT):
            # The slot counts as a host with one rank.
            position = int(slot.hostname.removeprefix(_LOCAL_SLOT))
            # It may have been removed since this round was planned.
            sharing = max(position, self.hosts.local_slots)
            variables.update(_gpu_share(position - 1, sharing))
        try:
            self.workers[key] = RankProcess(
                self._run,
                str(number),
                number,
                variables,
                host=slot.hostname,
                local_size=sharing,
            )
        except (TowerError, OSError) as error:
            self._say(f"no worker on {slot.hostname}: {error}")
            self.workers.pop(key, None)
            self.rounds.record_end(key)
            self._run.events.put(None)

    def _announce_hosts(self) -> None:
        """Notify the workers that hosts were added or removed."""
        before, now = self._offered, self.hosts.available()
        plan = fill_slots(now, self._options.max_ranks)
        if now == before or plan == [*self.rounds.plan.values()]:
            return
        self._offered = now
        # Horovod's own whole seconds would hide a second change within one.
        self._run.server.put(HOSTS_UPDATED, [time.time(), _ADDED_OR_REMOVED])


def _gpu_share(index: int, count: int) -> dict[str, str]:
    """The variable that shows one of ``count`` slots its share of the GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu for gpu in visible.split(",") if gpu]
    else:
        number = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
        gpus = [str(gpu) for gpu in range(number)]
    share = len(gpus) // count
    if share == 0:
        return {}
    first = index * share
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + share])}
