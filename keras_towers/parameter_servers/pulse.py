"""Signs of life that workers give one another, on a parameter server."""

from __future__ import annotations

import time

from keras_towers import settings
from keras_towers.meeting.addresses import is_reachable
from keras_towers.meeting.watch import Liveness
from keras_towers.parameter_servers.connection import Connection
from keras_towers.parameter_servers.shared import Table


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
        self._last = -settings.BEAT_S

    def beat(self) -> None:
        """Tell that this worker goes on, not more often than need be."""
        now = time.monotonic()
        if now - self._last >= settings.BEAT_S:
            self._last = now
            self._table.insert(self._connection.rank, str(time.time_ns()))

    def watch(self) -> Watch:
        """Begin to look at the others."""
        return Watch(self, self._connection)

    def last(self, rank: int) -> str | None:
        """The last sign of a worker: another text each time."""
        return self._table.get(rank)


class Watch(Liveness):
    """The workers' signs of life, for as long as this worker waits.

    Args:
        pulse: what they tell.
        connection: this worker's.
    """

    def __init__(self, pulse: Pulse, connection: Connection):
        self._connection = connection
        ranks = range(connection.size)
        super().__init__(ranks, pulse.last)
        self._reached = Liveness.of_answers(ranks, self.reaches)

    def is_gone(self, rank: int) -> bool:
        """Whether nobody has listened at the address of a worker for long."""
        self._reached.look(rank)
        return self._reached.silent_s(rank) > settings.GONE_S

    def reaches(self, rank: int) -> bool:
        """Whether anybody listens at the address of a worker."""
        return is_reachable(self._connection.cluster.workers[rank])
