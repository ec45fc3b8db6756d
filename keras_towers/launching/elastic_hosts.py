"""The hosts of an elastic job: how they are found, and which are avoided."""

from __future__ import annotations

import collections
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path

from keras_towers import settings, subprocesses
from keras_towers.errors import TowerError
from keras_towers.rendezvous.hosts import read_entries
from keras_towers.rendezvous.network import is_local

Discover = Callable[[], dict[str, int]]
"""Returns the number of slots of each host."""
LOCAL_SLOT = "127.0.0."
"""A slot of this machine is a host of this name, followed by 1, 2, ..."""


def discover_by_script(script: Path) -> Discover:
    """Make a function that runs ``script`` and reads the hosts it prints.

    Horovod's own version starts two Python processes for every query, once a
    second.
    """
    program = str(script.absolute())

    def discover() -> dict[str, int]:
        try:
            result = subprocesses.run([program], settings.DISCOVERY_S)
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

    return discover


def split_this_machine(discover: Discover) -> Discover:
    """Make each slot of this machine a separate host.

    A worker that fails makes the job avoid its host, including all workers on
    it. If this machine were the only host, the job would end.
    """
    is_here = functools.cache(is_local)

    def discover_slots() -> dict[str, int]:
        hosts: dict[str, int] = {}
        numbers = itertools.count(1)
        for host, count in discover().items():
            if is_here(host):
                for _ in range(count):
                    hosts[f"{LOCAL_SLOT}{next(numbers)}"] = 1
            else:
                hosts[host] = count
        return hosts

    return discover_slots


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
        discover: Discover,
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
        return sum(host.startswith(LOCAL_SLOT) for host in self._found)

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
