"""The rounds of an elastic job, in which workers are told their ranks."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from keras_towers import settings
from keras_towers.rendezvous.hosts import RankPlacement


def key_of(slot: RankPlacement) -> str:
    """The key by which a worker asks for its place, the same in all rounds."""
    return f"{slot.hostname}:{slot.local_rank}"


class ElasticRounds:
    """Tells each worker its rank once all workers of its round have arrived.

    A rank that cannot reach another one while Horovod connects is ended, by a
    C++ thread. So nobody is told a rank before all workers have asked.
    """

    def __init__(self, on_left: Callable[[], None]):
        self._on_left = on_left
        self._lock = threading.Lock()
        self._number = 0
        self.plan: dict[str, RankPlacement] = {}
        self.ended: list[str] = []
        self._left: set[str] = set()
        self._here: dict[str, socket.socket] = {}
        self._informed: set[str] = set()

    def begin(self, plan: Sequence[RankPlacement]) -> None:
        """Begin a round."""
        with self._lock:
            self._number += 1
            self.plan = {key_of(slot): slot for slot in plan}
            self.ended, self._left = [], set()
            self._here, self._informed = {}, set()

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
        """Wait until all workers are there; None for one without a place."""
        left = 0
        while not _closed(connection):
            with self._lock:
                if key not in self.plan:
                    return None
                if self._number != left:
                    if key in self._informed or self.ended:
                        self._left.add(key)
                        left = self._number
                        self._on_left()
                    elif self._arrives(key, connection):
                        return self.plan[key]
            time.sleep(settings.POLL_S)
        return None

    def hold(self, rank: int, connection: socket.socket) -> None:
        """Hold a worker that has taken the rank it was started with."""
        # A script that starts Horovod by itself connects without asking.
        number = self._number
        key = next((k for k, s in self.plan.items() if s.rank == rank), None)
        while key and not _closed(connection):
            with self._lock:
                over = number != self._number or self.ended
                if (
                    over
                    or key in self._informed
                    or self._arrives(key, connection)
                ):
                    return
            time.sleep(settings.POLL_S)

    def _arrives(self, key: str, connection: socket.socket) -> bool:
        """Record a worker's arrival; return whether its round is complete."""
        self._here[key] = connection
        if not self._informed and (
            self._here.keys() != self.plan.keys()
            or any(map(_closed, self._here.values()))
        ):
            return False
        self._informed.add(key)
        return True


def _closed(connection: socket.socket) -> bool:
    """Whether the asking worker is gone, usually because it was killed."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True
