"""Signs of life that workers give one another, on a parameter server."""

from __future__ import annotations

import time
from collections.abc import Mapping

from keras_towers.meeting.addresses import is_reachable
from keras_towers.parameter_servers.connection import Connection
from keras_towers.parameter_servers.shared import Table

_BEAT_S = 2.0
# After how long without anybody listening at its address a worker has died.
_GONE_S = 10.0


class Pulse:
    """Tells that this worker goes on, and knows the same of all others.

    A process that was stopped can still be reached at its address: the kernel
    answers for it.

    Args:
        connection: this worker's.
        name: of what the workers share; the same in all.
    """

    def __init__(self, connection: Connection, name: str):
        self._connection = connection
        self._table = Table(name, connection.devices[0], connection.size)
        self._last = -_BEAT_S

    def beat(self) -> None:
        """Tell that this worker goes on, not more often than need be."""
        now = time.monotonic()
        if now - self._last >= _BEAT_S:
            self._last = now
            self._table.insert(self._connection.rank, str(time.time_ns()))

    def watch(self) -> Watch:
        """Begin to look at the others."""
        return Watch(self, self._connection)

    def beats(self) -> Mapping[int, str]:
        """What each worker has told last: another text each time."""
        return self._table.items()


class Watch:
    """Looks at other workers for as long as this one waits.

    What was before does not count: all of them may have been busy.

    Args:
        pulse: what they tell.
        connection: this worker's.
    """

    def __init__(self, pulse: Pulse, connection: Connection):
        self._pulse = pulse
        self._connection = connection
        now = time.monotonic()
        self._told: Mapping[int, str] = {}
        self._heard = dict.fromkeys(range(connection.size), now)
        self._reached = dict.fromkeys(range(connection.size), now)

    def look(self) -> None:
        """Find out who has told something."""
        told = self._pulse.beats()
        now = time.monotonic()
        for rank, text in told.items():
            if self._told.get(rank) != text:
                self._heard[rank] = now
        self._told = told

    def is_gone(self, rank: int) -> bool:
        """Whether nobody has listened at the address of a worker for long."""
        now = time.monotonic()
        if self.reaches(rank):
            self._reached[rank] = now
        return now - self._reached[rank] > _GONE_S

    def reaches(self, rank: int) -> bool:
        """Whether anybody listens at the address of a worker."""
        return is_reachable(self._connection.cluster.workers[rank])

    def silent_s(self, rank: int) -> float:
        """For how many seconds a worker has told nothing."""
        return time.monotonic() - self._heard[rank]
