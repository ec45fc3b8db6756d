"""Who of a job's processes is alive, who is waited for, and for how long."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

from keras_towers import settings

# When a wait is told of: after so many seconds, then after as many times more.
_NOTICE_GROWTH = 4


class Liveness:
    """The time of the last sign of life of each rank; at first all live."""

    def __init__(
        self,
        ranks: Iterable[int],
        signs_of: Callable[[Sequence[int]], Mapping[int, Any]],
    ):
        self._signs_of = signs_of
        self.signs: dict[int, Any] = dict.fromkeys(ranks)
        self.heard: dict[int, float] = dict.fromkeys(
            self.signs, time.monotonic()
        )

    @classmethod
    def of_answers(
        cls, ranks: Iterable[int], answers: Callable[[int], bool]
    ) -> Liveness:
        """A liveness with answers as signs of life."""
        return cls(
            ranks,
            lambda some: {r: time.monotonic() for r in some if answers(r)},
        )

    def look(self, *ranks: int) -> None:
        """Look for new signs of some ranks, or of all."""
        ranks = ranks or tuple(self.signs)
        found = self._signs_of(ranks)
        for rank in ranks:
            sign = found.get(rank)
            if sign is not None and sign != self.signs[rank]:
                self.signs[rank] = sign
                self.heard[rank] = time.monotonic()

    def silent_s(self, rank: int) -> float:
        """Seconds since the last sign of a rank."""
        return time.monotonic() - self.heard[rank]


@dataclasses.dataclass
class Progress:
    """The progress of a rank; ``what`` is empty outside of training."""

    position: int = 0
    what: str = ""
    beat: int = 0


def waited_for(
    mine: Progress,
    others: Mapping[int, Progress | None],
    silent: Collection[int],
) -> dict[int, str]:
    """The ranks that a rank waits for, and for each, what keeps it."""
    found = {}
    for rank, place in others.items():
        if place is None:
            found[rank] = "has given no sign of life"
            continue
        at = f"in {place.what}" if place.what else "outside of training"
        if rank in silent:
            found[rank] = "has stopped giving signs of life"
        elif place.position < mine.position:
            found[rank] = f"is still {at}"
        elif place.position == mine.position and place.what != mine.what:
            # As many steps, but others: each waits for the other one.
            found[rank] = f"is {at}"
    return found


def waiting(
    limit_s: float | None, pause_s: float, heard: Collection[float] = ()
) -> Iterator[float]:
    """Loop with pauses; yield the seconds since the beginning if to be told."""
    begun = time.monotonic()
    limit_s = math.inf if limit_s is None else limit_s
    notice_s = settings.NOTICE_S
    while time.monotonic() - max((begun, *heard)) < limit_s:
        waited_s = time.monotonic() - begun
        due = waited_s >= notice_s
        notice_s *= _NOTICE_GROWTH if due else 1
        yield waited_s if due else 0.0
        time.sleep(pause_s)


class AnswerWatch(threading.Thread):
    """Asks processes at every beat; calls ``lost`` once if some are silent."""

    def __init__(
        self,
        ranks: Iterable[int],
        answers: Callable[[int], bool],
        limit_s: float,
        lost: Callable[[list[int]], None],
    ):
        super().__init__(name="keras-towers-answers", daemon=True)
        self.limit_s = limit_s
        self._others = Liveness.of_answers(ranks, answers)
        self._lost = lost
        self._ended = threading.Event()

    def stop(self) -> None:
        """End the thread, which may take until the last answer."""
        self._ended.set()
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        """Ask all others at every beat."""
        others = self._others
        while not self._ended.wait(min(self.limit_s / 4, settings.BEAT_S)):
            others.look()
            lost = [
                r for r in others.heard if others.silent_s(r) > self.limit_s
            ]
            if lost and not self._ended.is_set():
                self._lost(lost)
                return
