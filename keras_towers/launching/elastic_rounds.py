"""The rounds of an elastic job: when its workers meet, and their ranks."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from keras_towers import settings
from keras_towers.rendezvous.hosts import RankPlacement


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

    def begin(self, plan: Sequence[RankPlacement]) -> None:
        """Begin a round."""
        with self._lock:
            self._number += 1
            self.plan = {slot.key: slot for slot in plan}
            self.ended, self._left = [], set()
            self._arrived, self._informed = {}, set()

    def end(self, key: str) -> None:
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

    def place(
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

    def hold(self, rank: int, connection: socket.socket) -> None:
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
