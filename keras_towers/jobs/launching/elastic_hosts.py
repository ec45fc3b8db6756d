"""The hosts of an elastic job: how it shrinks and grows.

They are given, or a program finds them. ``job.py`` asks for them between
rounds.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keras_towers.foundation import commands, settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.system import absolute
from keras_towers.jobs.launching.rank_process import check_reachable
from keras_towers.jobs.rendezvous.hosts import read_entries
from keras_towers.jobs.rendezvous.network import is_local

THIS_MACHINE = "localhost"


class JobOver(Exception):
    """The job has ended while a script looked for its hosts."""


@dataclass(frozen=True)
class ElasticOptions:
    """How a job may shrink and grow when it starts again.

    Attributes:
        ranks: the number of ranks at the start.
        min_ranks: the smallest number with which the job goes on.
        max_ranks: the largest number; None: the number of slots.
        hosts: the number of slots of each host; None: this machine.
        script: a program that prints the hosts instead.
        cooldown_s: the shortest and longest time to avoid a host.
        timeout_s: how long to wait for slots.

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

    def __post_init__(self) -> None:
        least, most = self.min_ranks, self.max_ranks or self.ranks
        if not least:
            raise TowerError("an elastic job needs --min-np or -np")
        if not least <= self.ranks <= most:
            options = [f"--min-np {least}"]
            # Without -np, a job begins with the fewest.
            options += [f"-np {self.ranks}"] if self.ranks != least else []
            options += [f"--max-np {most}"] if self.max_ranks else []
            raise TowerError(
                f"{', '.join(options[:-1])} and {options[-1]} must be in "
                "ascending order"
            )
        shortest, longest = self.cooldown_s
        if not 1 <= shortest <= longest <= 3600:
            raise TowerError(
                "--blacklist-cooldown-range takes two numbers of seconds from "
                f"1 to 3600, the smaller first, not {shortest} {longest}"
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

    def discover(self, ended: threading.Event | None = None) -> dict[str, int]:
        """Return the number of slots of each host.

        Args:
            ended: set by another thread when the job ends, which then is a
                ``JobOver``.
        """
        if self.script:
            return one_machine(discover_by_script(self.script, ended))
        slots = {THIS_MACHINE: self.max_ranks or self.ranks}
        return one_machine(self.hosts or slots)


def discover_by_script(
    script: Path, ended: threading.Event | None = None
) -> dict[str, int]:
    """Run a script, and read the hosts and their slots that it prints.

    Horovod's own version starts two Python processes for every query, once a
    second.

    Args:
        script: the program.
        ended: ends it when another thread sets it.

    Raises:
        JobOver: ``ended`` was set.
        TowerError: it cannot be run, has failed, or has printed something else.
    """
    try:
        result = commands.run_command(
            [str(absolute(script))],
            settings.DISCOVERY_S,
            grace_s=settings.GRACE_S,
            stop=ended,
        )
    except OSError as error:
        raise TowerError(
            f"the host discovery script {script} cannot be run "
            f"({error.strerror}): make it an executable file"
        ) from None
    if ended is not None and ended.is_set():
        raise JobOver
    if result.code != 0:
        raise TowerError(
            f"the host discovery script {script} "
            f"{result.reason(settings.DISCOVERY_S)}"
        )
    entries = [*filter(str.strip, result.stdout.splitlines())]
    form = (
        f"the host discovery script {script} must print lines like "
        "'host:2' or 'host'"
    )
    # An empty list is no error: hosts may appear later.
    return read_entries(entries, form) if entries else {}


def one_machine(slots: dict[str, int]) -> dict[str, int]:
    """Count the slots of this machine's names together: they share its GPUs."""
    hosts: collections.Counter[str] = collections.Counter()
    for host, count in slots.items():
        if count > settings.MAX_SLOTS:
            raise TowerError(
                f"the host {host} has {count:,} slots: give it "
                f"{settings.MAX_SLOTS:,} at most"
            )
        hosts[THIS_MACHINE if _is_here(host) else host] += count
    return dict(hosts)


def _is_here(host: str) -> bool:
    """Whether a host is this machine, which a name that is unknown is not."""
    try:
        return _is_local(host)
    except TowerError:
        return False


# Hosts are discovered once a second.
_is_local = functools.cache(is_local)


class ElasticHosts:
    """The hosts of a job, those known longest first.

    Args:
        discover: returns the number of slots of each host.
        found: the last result of ``discover``.
        cooldown_s: the shortest and longest time to avoid a host. The time is
            the shortest at first, and doubles with each failure on it.
        say: writes a message.
        check: raises a ``TowerError`` if some hosts cannot be reached.
        needed: how many slots are never avoided, since no other host will come;
            0: in an elastic job.
    """

    def __init__(
        self,
        discover: Callable[[], dict[str, int]],
        found: dict[str, int],
        cooldown_s: tuple[int, int],
        say: Callable[[str], None],
        check: Callable[[list[str]], None] = check_reachable,
        needed: int = 0,
    ):
        self._discover = discover
        self._cooldown_s = cooldown_s
        self._say = say
        self._check = check
        self._needed = needed
        self._last_error = ""
        self._found = found
        self._known: list[str] = list(found)
        self._killed: set[str] = set()
        self._failures: collections.Counter[str] = collections.Counter()
        self._avoided_until: dict[str, float] = {}
        # A thread discovers hosts while the job asks for them.
        self._lock = threading.RLock()

    def discover(self) -> None:
        """Discover hosts; if that fails, keep the known ones."""
        try:
            self._found, self._last_error = self._discover(), ""
        except TowerError as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                self._say(f"{error}; going on with the hosts found before")

    def avoid(self, host: str, was_killed: bool = False) -> None:
        """Avoid a host for a while, because a rank has failed there.

        Args:
            host: the host.
            was_killed: whether the rank was killed, for which the host is to
                blame only if that happens again.
        """
        if was_killed and host not in self._killed:
            self._killed.add(host)
            return
        with self._lock:
            free = self._free()
            others = free.keys() & {*self._known} - {host}
            if sum(free[other] for other in others) < self._needed:
                return
            shortest, longest = self._cooldown_s
            pause_s = min(longest, shortest * 2 ** self._failures[host])
            self._failures[host] += 1
            self._avoided_until[host] = time.monotonic() + pause_s
            self._known = [name for name in self._known if name != host]
        option = "" if self._needed else " (--blacklist-cooldown-range)"
        self._say(
            f"no rank starts on {host} for {pause_s} s, since one has failed "
            f"there{option}"
        )

    def available(self) -> dict[str, int]:
        """Return the slots of each host that is there and not avoided."""
        with self._lock:
            slots, free = self._found, self._free()
            for host in free:
                if host not in self._known and self._is_reachable(host):
                    self._known.append(host)
            self._known = [host for host in self._known if host in slots]
            return {h: free[h] for h in self._known if h in free}

    def _free(self) -> dict[str, int]:
        """Return the slots of each host that is not avoided."""
        now, avoided = time.monotonic(), self._avoided_until
        slots = self._found.items()
        return {h: n for h, n in slots if avoided.get(h, 0) <= now}

    def _is_reachable(self, host: str) -> bool:
        """Whether ranks can be started on a host; if not, avoid it."""
        try:
            self._check([] if _is_here(host) else [host])
        except TowerError as error:
            self._say(str(error))
            self.avoid(host)
            return False
        return True
