"""The rounds of an elastic job: who takes part, and who is there.

A process that cannot reach another one while Horovod connects is lost: an
exception in a C++ thread ends it. So nobody is told a rank before all workers
of the round have come to ask for theirs. If one dies before that, the others
never notice: they are told of the round after it, without the dead one.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_towers.launching.workers import Workers

from keras_towers import settings


def slot_name(host: str, local_rank: int) -> str:
    """Horovod's name of a slot."""
    return f"{host}[{local_rank}]"


class Rounds:
    """Tells each worker its rank when all are there.

    Args:
        driver: Horovod's, which decides who takes part in the next round.
        workers: of the job.
    """

    def __init__(self, driver: Any, workers: Workers):
        self._driver = driver
        self._workers = workers
        self._lock = threading.Lock()
        self._number = 0
        self._plan: dict[str, Any] = {}
        self._here: dict[str, socket.socket] = {}
        self._told: dict[str, int] = {}
        self._complete = False

    def begin(self, plan: Iterable[Any]) -> None:
        """Begin a round.

        Args:
            plan: Horovod's ``SlotInfo`` of each worker.
        """
        slots = {slot_name(s.hostname, s.local_rank): s for s in plan}
        with self._lock:
            self._workers.forget(slots.keys() - self._plan.keys())
            self._number += 1
            self._plan = slots
            self._here = {}
            self._complete = False

    def place(
        self, host: str, local_rank: int, connection: socket.socket
    ) -> Any | None:
        """Wait until all workers of a round are there.

        Returns:
            Its ``SlotInfo``; None if it takes no part any more.
        """
        name = slot_name(host, local_rank)
        wanted = 0
        while not _closed(connection):
            with self._lock:
                number = self._number
                slot = self._plan.get(name)
                leaves = self._told.get(name) == number or self._broken()
            if number == wanted or self._driver.finished():
                time.sleep(settings.POLL_S)
            elif slot is None:
                return None
            elif leaves:
                wanted = number
                self._driver.record_ready(host, local_rank)
            elif self._comes(name, connection, number):
                return slot
            else:
                time.sleep(settings.POLL_S)
        return None

    def hold(self, rank: int, connection: socket.socket) -> None:
        """Let a worker wait that has taken the rank it was started with."""
        # A script that starts Horovod by itself connects without asking.
        number = self._number
        name = next((n for n, s in self._plan.items() if s.rank == rank), None)
        while (
            name is not None
            and number == self._number
            and self._told.get(name) != number
            and not self._broken()
            and not self._driver.finished()
            and not self._comes(name, connection, number)
        ):
            time.sleep(settings.POLL_S)

    def _comes(self, name: str, connection: socket.socket, number: int) -> bool:
        """Note that a worker is there; whether all of its round are."""
        with self._lock:
            if number != self._number:
                return False
            self._here[name] = connection
            if not self._complete:
                self._complete = (
                    self._here.keys() == self._plan.keys()
                    and not self._broken()
                    and not any(map(_closed, self._here.values()))
                )
            if self._complete:
                self._told[name] = number
            return self._complete

    def _broken(self) -> bool:
        return self._workers.any_ended(self._plan.keys())


def _closed(connection: socket.socket) -> bool:
    """Whether who asked is gone: killed, as a rule."""
    look = select.poll()
    try:
        look.register(connection, select.POLLIN)
        return bool(look.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True
