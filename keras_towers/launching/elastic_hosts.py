"""The hosts of an elastic job, which come and go."""

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
LOCAL_SLOT = "127.0.0."
"""Slots of this machine, as hosts, are this and a number from 1."""


def discover_by_script(script: Path) -> Discover:
    """Make a function that runs ``script`` and reads what it prints.

    Horovod's own version starts two Python processes for every query, once a
    second.
    """
    program = str(script.absolute())

    def discover() -> dict[str, int]:
        try:
            ended = subprocesses.run([program], settings.DISCOVERY_S)
        except OSError as error:
            raise TowerError(
                f"the host discovery script {script} cannot be run "
                f"({error.strerror}): it has to be an executable file"
            ) from None
        if ended.code != 0:
            raise TowerError(
                f"the host discovery script {script} "
                f"{ended.reason(settings.DISCOVERY_S)}"
            )
        entries = [*filter(str.strip, ended.stdout.splitlines())]
        form = (
            f"the host discovery script {script} has to print lines like "
            "'host:2' or 'host'"
        )
        # An empty list is no error: hosts may appear later.
        return read_entries(entries, form) if entries else {}

    return discover


def split_this_machine(discover: Discover) -> Discover:
    """Make each slot of this machine a separate host.

    A host is given up where a worker on it fails, with all others on it. If it
    were the only one, that would be the end of the job.
    """
    is_here = functools.cache(is_local)

    def discover_slots() -> dict[str, int]:
        hosts: dict[str, int] = {}
        here = itertools.count(1)
        for host, count in discover().items():
            if is_here(host):
                hosts |= {f"{LOCAL_SLOT}{next(here)}": 1 for _ in range(count)}
            else:
                hosts[host] = count
        return hosts

    return discover_slots


class Hosts:
    """The hosts of an elastic job, oldest first.

    Args:
        discover: returns the slots of each host.
        found: the last result of ``discover``.
        cooldown_s: the shortest and longest time to avoid a host; the time
            doubles with each failure.
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
        self._wrong = ""
        self._found = found
        self._known: list[str] = []
        self._failures: collections.Counter[str] = collections.Counter()
        self._avoided_until: dict[str, float] = {}

    def discover(self) -> None:
        """Discover hosts; if that fails, keep the known ones."""
        try:
            self._found, self._wrong = self._discover(), ""
        except TowerError as error:
            if str(error) != self._wrong:
                self._wrong = str(error)
                self._say(f"{error}; going on with the hosts of before")

    def avoid(self, host: str) -> None:
        """Avoid a host where a worker has failed, for a while."""
        shortest, longest = self._cooldown_s
        self._failures[host] += 1
        pause_s = min(longest, shortest * 2 ** self._failures[host])
        self._avoided_until[host] = time.monotonic() + pause_s
        text = f"no worker on {host} for {pause_s} s, as one has failed there"
        self._say(f"{text} (--blacklist-cooldown-range)")
        self.available()

    @property
    def local_slots(self) -> int:
        """The number of slots of this machine, including avoided ones."""
        return sum(host.startswith(LOCAL_SLOT) for host in self._found)

    def available(self) -> dict[str, int]:
        """The slots of each host that is not avoided."""
        now = time.monotonic()
        found = {
            host: count
            for host, count in self._found.items()
            if self._avoided_until.get(host, 0) <= now
        }
        self._known = list(
            dict.fromkeys(h for h in (*self._known, *found) if h in found)
        )
        return {host: found[host] for host in self._known}
