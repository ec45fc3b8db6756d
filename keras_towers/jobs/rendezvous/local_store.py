"""A job's store in the process that holds its values."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_towers.foundation import settings
from keras_towers.foundation.object_types import JsonObject
from keras_towers.jobs.rendezvous import store
from keras_towers.jobs.rendezvous.hosts import RankPlacement
from keras_towers.jobs.rendezvous.reports import Reports
from keras_towers.jobs.rendezvous.store import (
    SCOPE,
    MissingRanks,
    Progress,
    Store,
)

RENDEZVOUS_SCOPE = "global"
"""The scope in which each rank of Horovod writes its address first."""
_KEPT = (store.FACTS, store.COMMITTED)


class LocalStore(Store):
    """The values of a job, and the requests that wait for some; thread-safe.

    Attributes:
        gone: the name and state of each rank that is gone.
        values: the values of each scope.
    """

    def __init__(self) -> None:
        self.gone: dict[int, tuple[str, str]] = {}
        self.values: dict[str, dict[str, bytes]] = collections.defaultdict(dict)
        self._reports = Reports()
        # Of lists to which some ranks have yet to contribute: the parts of
        # each rank, by the key of the list.
        self._parts: dict[str, dict[int, object]] = {}
        # The functions to call when a key is written.
        self._awaited: collections.defaultdict[
            tuple[str, str], set[Callable[[], None]]
        ] = collections.defaultdict(set)
        self._given_up: collections.Counter[str] = collections.Counter()
        self._scope_size: dict[str, int] = {}
        self._lock = threading.RLock()

    def begin_round(self, plan: Sequence[RankPlacement]) -> None:
        """Discard the previous round, and let the ranks of a plan meet."""
        with self._lock:
            ours = self.values[SCOPE]
            kept = {name: ours[name] for name in _KEPT if name in ours}
            self.values.clear()
            self.values[SCOPE].update(kept)
            self._reports = Reports()
            self._parts.clear()
            self.gone.clear()
            self._given_up.clear()
            self._scope_size = {}
            for slot in plan:
                self._scope_size[RENDEZVOUS_SCOPE] = slot.size
                self._scope_size[f"local_{slot.hostname}"] = slot.local_size
                self._scope_size[f"cross_{slot.local_rank}"] = slot.cross_size

    def read(self, scope: str, key: str, hold_s: float = 0) -> bytes | None:
        with self._lock:
            value = self.values[scope].get(key)
        if value is not None or not hold_s:
            return value
        written = threading.Event()
        self.await_key(scope, key, written.set)
        written.wait(hold_s)
        self.forget(scope, key, written.set)
        return self.read(scope, key)

    def await_key(self, scope: str, key: str, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when a key is there, by any thread."""
        with self._lock:
            self._awaited[scope, key].add(wake)
            if key in self.values[scope]:
                wake()

    def forget(self, scope: str, key: str, wake: Callable[[], None]) -> None:
        """Remove ``wake`` from the waiting functions."""
        with self._lock:
            self._awaited[scope, key].discard(wake)
            if not self._awaited[scope, key]:
                del self._awaited[scope, key]

    def write(self, scope: str, key: str, value: bytes) -> None:
        with self._lock:
            self.values[scope][key] = value
            for wake in self._awaited.get((scope, key), ()):
                wake()

    def setdefault(self, key: str, value: object) -> Any:
        with self._lock:
            if key not in self.values[SCOPE]:
                self.put(key, value)
            return self.get(key)

    def give(
        self,
        key: str,
        rank: int,
        size: int,
        value: object,
        hold_s: float = 0,
        awaited: str = "",
    ) -> tuple[MissingRanks, Any]:
        self.contribute(key, rank, size, value)
        found = self.get(awaited or key, hold_s)
        return self.contribute(key, rank, size, value), found

    def contribute(
        self, key: str, rank: int, size: int, value: object
    ) -> MissingRanks:
        """Contribute to a list, as ``give`` does, without waiting."""
        with self._lock:
            if key in self.values[SCOPE]:
                return MissingRanks([], 0)
            given = self._parts.setdefault(key, {})
            given[rank] = value
            if len(given) == size:
                del self._parts[key]
                parts = (given[r] for r in range(size))
                self.put(key, [part for part in parts if part is not None])
            missing = (r for r in range(size) if r not in given)
            some = itertools.islice(missing, settings.MAX_RANKS_NAMED)
            return MissingRanks([*some], size - len(given))

    def add(self, key: str, rank: int, items: Sequence[str]) -> None:
        with self._lock:
            added = self.get(key) or {}
            for item in items:
                ranks = added.setdefault(item, [])
                if rank not in ranks:
                    added[item] = [*ranks, rank][:2]
            self.put(key, added)

    def delete(self, scope: str, key: str) -> None:
        """Delete a value; a shared scope only once all its ranks have asked."""
        with self._lock:
            if scope not in self._scope_size:
                self.values[scope].pop(key, None)
                return
            self._given_up[scope] += 1
            if self._given_up[scope] == self._scope_size[scope]:
                self.values[scope].clear()
                del self._given_up[scope]

    def report(self, rank: int, progress: Mapping[str, Any]) -> JsonObject:
        """Record a rank's progress; return what it should know of others."""
        with self._lock:
            reports = self._reports
            reports.add(rank, Progress(**progress))
            # Every rank gets this list, however many are gone: keep it short.
            others = (
                (f"{name} ({error[0]})" if error else name, state)
                for r, (name, state) in self.gone.items()
                if r != rank
                for error in [self.get(f"{store.ERROR}{r}")]
            )
            gone = itertools.islice(others, settings.MAX_RANKS_NAMED)
            return {
                "awaited": reports.awaited(rank),
                "apart": reports.apart(rank),
                "gone": dict(gone),
            }
