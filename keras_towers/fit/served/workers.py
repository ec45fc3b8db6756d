"""What becomes of the workers of a ``fit``: they leave, fail or die."""

from __future__ import annotations

import time
from collections.abc import Callable

from keras_towers._notices import announce as tell
from keras_towers.errors import TowerError
from keras_towers.parameter_servers import remote
from keras_towers.parameter_servers.connection import Connection
from keras_towers.parameter_servers.peers import worker_name
from keras_towers.parameter_servers.shared import Event, Table

# How often to look for workers that have died, and after how long without an
# answer one has.
_LOOK_S = 2.0
_GONE_S = 10.0


class Workers:
    """The workers of one ``fit``, as one of them sees them.

    Args:
        connection: this worker's.
        name: prefix of the names of what the workers share; another one for
            each ``fit``.
    """

    def __init__(self, connection: Connection, name: str):
        self._connection = connection
        self._name = name
        self._rank = connection.rank
        self._others = [r for r in range(connection.size) if r != self._rank]
        self._server = connection.devices[0]
        self._failed = Table(f"{name}/failed", self._server, connection.size)

    def left(self) -> None:
        """Tell the others that this one has left."""
        self._event(f"left/{self._rank}").set()

    def end(self) -> None:
        """Tell the others that all is over; on the chief only."""
        self._event("ended").set()

    @property
    def ended(self) -> bool:
        """Whether all is over; waits a moment for it."""
        return self._happened(self._event("ended"))

    def end_epoch(self, epoch: int) -> None:
        """Tell the others that an epoch has ended; on the chief only."""
        self._event(f"epoch/{epoch}").set()

    def wait_for_epoch(self, epoch: int) -> None:
        """Wait until the chief has told that an epoch has ended.

        Raises:
            TowerError: the chief has failed or died.
        """
        look = self.watch_chief()
        while not self._happened(self._event(f"epoch/{epoch}")):
            look()
            self.check_failed()

    def fail(self, text: str) -> None:
        """Tell what has ended this worker's ``fit``; "" if it goes on."""
        self._failed.insert(self._rank, text)

    def check_failed(self) -> None:
        """Raise what has ended the chief's ``fit``, if it has failed.

        Raises:
            TowerError: it has.
        """
        failure = self._failed.get(0)
        if failure:
            raise TowerError(
                f"the chief's fit has failed, and with it this one: {failure}"
            )

    def watch_chief(self) -> Callable[[], None]:
        """Return what raises once the chief has died, if called repeatedly."""
        seen = time.monotonic()

        def look() -> None:
            nonlocal seen
            now = time.monotonic()
            if self._rank == 0 or self._is_reachable(0):
                seen = now
            elif now - seen > _GONE_S:
                raise TowerError(
                    "the chief cannot be reached any more: start all tasks of "
                    "the job again, from a backup."
                )

        return look

    def wait_for_others(self, is_over: Callable[[], bool]) -> None:
        """Wait until all workers that live have left.

        Args:
            is_over: whether there is nothing left to do for those who have not.
        """
        seen = dict.fromkeys(self._others, time.monotonic())
        told = False
        while seen:
            for rank in list(seen):
                if self._happened(self._event(f"left/{rank}")):
                    del seen[rank]
                    continue
                now = time.monotonic()
                who = worker_name(self._connection, rank)
                if self._failed.get(rank):
                    del seen[rank]
                    tell(f"{who} has failed: fit ends without it")
                    continue
                if self._is_reachable(rank) and not is_over():
                    seen[rank] = now
                if now - seen[rank] > _GONE_S:
                    del seen[rank]
                    tell(f"{who} does not answer: fit ends without it")
                elif not told:
                    told = True
                    tell(f"the chief waits for {who} to end its fit")

    def wait_for_end(self) -> None:
        """Wait until the chief has told that all is over.

        Raises:
            TowerError: it has failed or died.
        """
        look = self.watch_chief()
        while not self.ended:
            look()
        self.check_failed()

    def stalled(self, timeout_s: float) -> TowerError:
        """Say who may be the reason of a wait that was too long."""
        failed = self._failed.items()
        told = [
            f"{worker_name(self._connection, rank)} {what}"
            for rank in self._others
            if (what := self._trouble(failed.get(rank, ""), rank))
        ]
        return TowerError(
            f"{worker_name(self._connection, self._rank)} has waited "
            f"{timeout_s:g} s for the other workers: "
            f"{', '.join(told) or 'one hangs or is very slow'}. Start it "
            "again, or give stall_timeout=..., in seconds, to wait for longer."
        )

    def _trouble(self, failure: str, rank: int) -> str:
        if failure:
            return f"has failed ({failure})"
        return "" if self._is_reachable(rank) else "cannot be reached any more"

    def _is_reachable(self, rank: int) -> bool:
        return remote.reachable(self._connection.cluster.workers[rank])

    def _event(self, what: str) -> Event:
        return Event(f"{self._name}/{what}", self._server)

    def _happened(self, event: Event) -> bool:
        try:
            with self._connection.naming_lost_servers():
                event.wait(_LOOK_S)
        except TimeoutError:
            return False
        return True
