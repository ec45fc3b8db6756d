"""Resources on the parameter servers that no worker needs any more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence


class Dropped:
    """Finds the names of shared resources that all workers have dropped.

    A worker drops a name when the objects by which it knew the resource are
    gone. What every worker has told that it has dropped can be freed: nobody is
    late, and nobody asks for it again, except for a worker that dies and runs
    its program from the beginning.
    """

    def __init__(self, size: int):
        self._size = size
        self._watched = 0
        self._news: list[str] = []
        self._by: dict[str, set[int]] = {}

    def drop_with(self, owner: object, name: str) -> None:
        """Drop a name with an object, when that is gone."""
        self._watched += 1
        weakref.finalize(owner, self._news.append, name).atexit = False

    def news(self) -> list[str]:
        """The names that this worker has dropped since the last time."""
        if self._watched:
            # Models are in cycles of references.
            gc.collect()
            self._watched = 0
        told, self._news[:] = list(self._news), []
        return told

    def heard(self, news: Sequence[Sequence[str]]) -> list[str]:
        """Take in the news of all workers, by rank."""
        for rank, names in enumerate(news):
            for name in names:
                self._by.setdefault(name, set()).add(rank)
        free = [n for n, by in self._by.items() if len(by) == self._size]
        for name in free:
            del self._by[name]
        return free
