"""Workers that do not answer: a parameter server asks all, and tells all.

Workers need not reach one another, and N of them would ask N times N times.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from keras_towers import settings
from keras_towers.meeting.addresses import answers, refuses
from keras_towers.meeting.liveness import Liveness
from keras_towers.parameter_servers import introduction
from keras_towers.parameter_servers.store import ServerStore

# Silence takes time: these are asked at once.
_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Missed:
    """A worker that has come, and does not answer."""

    silent_s: float
    has_ended: bool
    """Whether its host is there, without its process."""

    @property
    def is_gone(self) -> bool:
        """Whether the worker has not answered for long."""
        return self.silent_s > settings.LOST_S

    @property
    def is_lost(self) -> bool:
        """Whether the worker's host is gone as well, or its process hangs."""
        return self.is_gone and not self.has_ended


class Roll(Liveness):
    """The workers of a job, as a parameter server sees them."""

    def __init__(self, workers: Sequence[str], store: ServerStore):
        self._addresses = workers
        self._store = store
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._answered: dict[int, float | None] = {}
        self._refused: dict[int, bool] = {}
        super().__init__(range(len(workers)), self._last)

    def look(self, *ranks: int) -> None:
        """Ask some workers, or all, several at once."""
        ranks = ranks or tuple(self.signs)
        list(self._pool.map(self._ask, ranks))
        super().look(*ranks)

    def _ask(self, rank: int) -> None:
        address = self._addresses[rank]
        there = answers(address)
        self._answered[rank] = time.monotonic() if there else None
        self._refused[rank] = not there and refuses(address)

    def _last(self, rank: int) -> float | bool | None:
        # It may be gone before it was asked.
        come = self.signs[rank] or introduction.has_come(self._store, rank)
        return self._answered[rank] or come or None

    def silent_s(self, rank: int) -> float:
        """Seconds since the last sign of a worker; 0 if it answered at last."""
        return 0.0 if self._answered.get(rank) else super().silent_s(rank)

    def missed(self) -> dict[int, Missed]:
        """The workers that have come, but did not answer at last."""
        return {
            rank: Missed(self.silent_s(rank), self._refused[rank])
            for rank, sign in self.signs.items()
            if sign and not self._answered[rank]
        }


def tell_of(store: ServerStore, prefix: str, missed: dict[int, Missed]) -> None:
    """Tell all workers which of them do not answer."""
    told = {rank: dataclasses.astuple(one) for rank, one in missed.items()}
    store.put(_key(prefix), told)


def missed(store: ServerStore, prefix: str) -> dict[int, Missed]:
    """The workers that do not answer, as a server has told."""
    told = store.get(_key(prefix)) or {}
    return {int(rank): Missed(*one) for rank, one in told.items()}


def _key(prefix: str) -> str:
    return f"{prefix}missed"
