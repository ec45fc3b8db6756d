"""The ranks' reports on their progress: who is late, and who waits in vain.

Every rank reports again and again. So no report looks at all others: the work
grows linearly with the number of ranks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from keras_towers.foundation import settings
from keras_towers.foundation.message_lists import named
from keras_towers.jobs.rendezvous import activity
from keras_towers.jobs.rendezvous.store import Progress


@dataclasses.dataclass(frozen=True)
class Report:
    """The last report of a rank on its progress.

    Attributes:
        arrived: when it came, by ``time.monotonic``.
        since: when the first one came that said the same.
        progress: what it says.
    """

    arrived: float
    since: float
    progress: Progress

    @property
    def is_unchanged(self) -> bool:
        """Whether the rank has reported the same at two beats."""
        return self.since < self.arrived


class Reports:
    """The last report of each rank.

    Args:
        last: those that have come before, by rank.
    """

    def __init__(self, last: Mapping[int, Report] | None = None):
        self._last = dict(last or {})
        # The ranks that have not said the same twice; and, while there are
        # none, the position of the rank that is furthest behind.
        self._moving = {r for r, x in self._last.items() if not x.is_unchanged}
        self._least: list[int] | None = None

    def add(self, rank: int, progress: Progress) -> None:
        """Add a report that has just come."""
        now, last = time.monotonic(), self._last.get(rank)
        if last is not None and last.progress == progress:
            self._last[rank] = Report(now, last.since, progress)
            self._moving.discard(rank)
        else:
            self._last[rank] = Report(now, now, progress)
            self._moving.add(rank)
            self._least = None

    def awaited(self, rank: int) -> dict[str, str]:
        """Return the ranks for which a reporting rank waits, and why.

        They are late; or all ranks wait, and none has moved between two beats.
        """
        last, mine = self._last[rank], self._last[rank].progress
        late = {}
        for other in _ranks_after(rank, mine.size):
            report = self._last.get(other)
            if report is None:
                late[other] = "has given no sign of life"
                continue
            its = report.progress
            if last.arrived - report.arrived > its.limit_s:
                late[other] = "has stopped giving signs of life"
            elif its.position < mine.position:
                late[other] = its.where
            elif its.position == mine.position and its.action != mine.action:
                # Equally far in different programs: each waits for the other.
                late[other] = its.where
        return _by_name(late or self._all_that_wait(rank))

    def _all_that_wait(self, rank: int) -> dict[int, str]:
        """Return the other ranks if this one waits and no rank moves."""
        mine = self._last[rank].progress
        if not mine.waits or len(self._last) < mine.size or self._moving:
            return {}
        if self._least is None:
            reports = self._last.values()
            self._least = min(report.progress.position for report in reports)
        if self._least < mine.position:
            return {}
        waiting = {}
        for other in _ranks_after(rank, mine.size):
            its = self._last[other].progress
            is_there = its.waits and its.position == mine.position
            waiting[other] = "waits there, too" if is_there else its.where
        return waiting

    def apart(self, rank: int) -> dict[str, str]:
        """Describe a waiting rank, and those that wait in other exchanges.

        Returns:
            What each of them does, by their names; empty if there are none.
        """
        last, mine = self._last[rank], self._last[rank].progress
        if not (mine.exchanges and last.is_unchanged):
            return {}
        others = _ranks_after(rank, mine.size)
        if activity.SAVE in mine.exchanges:
            # Only rank 0 saves; and it needs no error if this rank has one.
            others = [0]
        against = {
            other: self._last[other].progress
            for other in others
            if other in self._last
            and self._last[other].is_unchanged
            and activity.SAVE not in self._last[other].progress.exchanges
            and self._last[other].progress.stands_against(mine)
        }
        if not against:
            return {}
        progress = {rank: mine, **against}
        return _by_name({r: p.does or p.where for r, p in progress.items()})


def _ranks_after(rank: int, size: int) -> list[int]:
    """Return the other ranks that a rank checks.

    In a large job these are only some of the ranks that follow it, so that a
    missing rank is reported by a limited number of ranks.
    """
    number = min(size, settings.MAX_RANKS_CHECKED + 1)
    return [(rank + after) % size for after in range(1, number)]


def _by_name(ranks: Mapping[int, str]) -> dict[str, str]:
    return named({f"rank {rank}": why for rank, why in sorted(ranks.items())})
