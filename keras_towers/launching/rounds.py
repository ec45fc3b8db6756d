"""The rounds of an elastic job: who takes part, and who is there.

A rank that cannot reach another one while Horovod connects is ended, by a C++
thread. So nobody is told a rank before all workers of the round have asked.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from keras_towers import settings
from keras_towers.rendezvous.hosts import Slot


def key_of(slot: Slot) -> str:
    """The key by which a worker asks for its place, the same in all rounds."""
    return f"{slot.hostname}:{slot.local_rank}"


class Rounds:
    """Tells each worker its rank when all of its round are there."""

    def __init__(self, on_left: Callable[[], None]):
        self._on_left = on_left
        self._lock = threading.Lock()
        self._number = 0
        self.plan: dict[str, Slot] = {}
        self.ended: list[str] = []
        self._left: set[str] = set()
        self._here: dict[str, socket.socket] = {}
        self._told: set[str] = set()

    def begin(self, plan: Sequence[Slot]) -> None:
        """Begin a round."""
        with self._lock:
            self._number += 1
            self.plan = {key_of(slot): slot for slot in plan}
            self.ended, self._left = [], set()
            self._here, self._told = {}, set()

    def end(self, key: str) -> None:
        """Note that the process of a worker has ended."""
        with self._lock:
            if key in self.plan:
                self.ended.append(key)

    @property
    def met(self) -> bool:
        """Whether all workers of the round have been there."""
        with self._lock:
            return bool(self._told)

    @property
    def over(self) -> bool:
        """Whether every worker has ended or asks for another round."""
        with self._lock:
            return self.plan.keys() <= {*self.ended, *self._left}

    def place(self, key: str, connection: socket.socket) -> Slot | None:
        """Wait until all are there; None for one that takes no part."""
        left = 0
        while not _closed(connection):
            with self._lock:
                if key not in self.plan:
                    return None
                if self._number != left:
                    if key in self._told or self.ended:
                        self._left.add(key)
                        left = self._number
                        self._on_left()
                    elif self._comes(key, connection):
                        return self.plan[key]
            time.sleep(settings.POLL_S)
        return None

    def hold(self, rank: int, connection: socket.socket) -> None:
        """Let a worker wait that has taken the rank it was started with."""
        # A script that starts Horovod by itself connects without asking.
        number = self._number
        key = next((k for k, s in self.plan.items() if s.rank == rank), None)
        while key and not _closed(connection):
            with self._lock:
                over = number != self._number or self.ended
                if over or key in self._told or self._comes(key, connection):
                    return
            time.sleep(settings.POLL_S)

    def _comes(self, key: str, connection: socket.socket) -> bool:
        """Note that a worker has come; return whether all of its round have."""
        self._here[key] = connection
        if not self._told and (
            self._here.keys() != self.plan.keys()
            or any(map(_closed, self._here.values()))
        ):
            return False
        self._told.add(key)
        return True


def _closed(connection: socket.socket) -> bool:
    """Whether the worker that asked is gone, as a rule killed."""
    look = select.poll()
    try:
        look.register(connection, select.POLLIN)
        return bool(look.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True
