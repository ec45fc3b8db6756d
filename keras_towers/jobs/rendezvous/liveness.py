"""Decides which processes of a job are alive, by how long they are silent.

The limits are in ``settings.py`` (``LOST_S``, ``BEAT_S``). ``watch.py``,
servers and launchers use these classes.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)

from keras_towers.foundation import settings

# A wait is reported after NOTICE_S, then each time it is this much longer.
_NOTICE_GROWTH = 4


class TaskState(enum.StrEnum):
    """The state of a process, as messages describe it."""

    ALIVE = "is alive"
    SUSPECTED = "does not answer"
    ENDED = "has ended"
    LOST = "is lost: it gives no sign of life"

    @property
    def is_gone(self) -> bool:
        """Whether waiting for the process is pointless."""
        return self in (TaskState.ENDED, TaskState.LOST)


ANSWERED: object = object()
"""A sign of life that counts as new each time."""


def ask_each(
    ask: Callable[[int], Hashable],
) -> Callable[[Sequence[int]], dict[int, Hashable]]:
    """Return a source of signs that asks all processes at the same time.

    However many are silent, it takes no longer than for one of them.

    Args:
        ask: asks a process, in a thread of its own, and returns its sign or
            None. It has to end: the source waits for it.
    """

    def source(ranks: Sequence[int]) -> dict[int, Hashable]:
        signs: dict[int, Hashable] = {}

        def ask_one(rank: int) -> None:
            signs[rank] = ask(rank)

        # No pool: Python closes these before it runs what ends a watch.
        threads = [
            threading.Thread(target=ask_one, args=(rank,), daemon=True)
            for rank in ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return signs

    return source


class Liveness:
    """Decides which processes are alive by their signs of life.

    A process that has given no sign yet is alive until the limit has passed.

    Args:
        ranks: the processes to watch.
        source: maps ranks to their last signs, if they have given any: a
            heartbeat, different each time; ``ANSWERED``; or
            ``TaskState.ENDED``.
        limit_s: a process is lost if silent for longer.
        may_restart: whether a process that has ended may come back within the
            limit; otherwise it is gone at once.
        clock: returns the time; by default, in seconds.

    Attributes:
        signs: the last sign of each rank, None before the first.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        source: Callable[[Sequence[int]], Mapping[int, Hashable]],
        limit_s: float,
        *,
        may_restart: bool = False,
        clock: Callable[[], float] | None = None,
    ):
        self._source = source
        self._clock = clock or time.monotonic
        self.limit_s = limit_s
        self._may_restart = may_restart
        self.signs: dict[int, Hashable | None] = dict.fromkeys(ranks)
        self._ended: set[int] = set()
        self._refreshed = self._clock()
        self._last_sign = dict.fromkeys(self.signs, self._refreshed)

    def refresh(self) -> None:
        """Read the signs of all processes."""
        signs = self._source(tuple(self.signs))
        self._refreshed = self._clock()
        self._ended = {
            r for r, sign in signs.items() if sign == TaskState.ENDED
        }
        for rank in signs.keys() - self._ended:
            sign = signs[rank]
            if sign is ANSWERED or sign not in (None, self.signs[rank]):
                self._last_sign[rank] = self._refreshed
                self.signs[rank] = sign

    def silent_s(self, rank: int) -> float:
        """Return the seconds between the last sign and the last refresh."""
        return self._refreshed - self._last_sign[rank]

    def state(self, rank: int) -> TaskState:
        """Return the state of a process at the last refresh."""
        is_late = self.silent_s(rank) > self.limit_s
        if rank in self._ended and (is_late or not self._may_restart):
            return TaskState.ENDED
        if is_late:
            return TaskState.LOST
        return TaskState.SUSPECTED if self.silent_s(rank) else TaskState.ALIVE

    def gone(self) -> dict[int, TaskState]:
        """Return the processes that have ended or are lost."""
        states = {rank: self.state(rank) for rank in self.signs}
        return {rank: state for rank, state in states.items() if state.is_gone}


def wait_loop(
    limit_s: float | None, pause_s: float, answered: Collection[float] = ()
) -> Iterator[float]:
    """Iterate with pauses, for a wait that is reported if it takes long.

    Args:
        limit_s: end the loop so long after its start, or after the last time
            in ``answered``; None: never.
        pause_s: the pause between two iterations.
        answered: times, by ``time.monotonic``, that the caller may add to.

    Yields:
        The seconds waited if it is time to report the wait, otherwise 0.
    """
    begun = time.monotonic()
    limit_s = math.inf if limit_s is None else limit_s
    notice_s = settings.NOTICE_S
    while time.monotonic() - max((begun, *answered)) < limit_s:
        waited_s = time.monotonic() - begun
        if waited_s >= notice_s:
            notice_s *= _NOTICE_GROWTH
            yield waited_s
        else:
            yield 0.0
        time.sleep(pause_s)
