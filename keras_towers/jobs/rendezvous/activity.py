"""What this rank does, and in which exchanges it waits.

Code that begins something for which a rank may wait marks it here. All ranks
make the same marks and exchanges, in the same order, so their numbers tell how
far a rank is. ``watch.py`` reports them.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.system import InThread

SAVE = "a save of another rank"
"""A wait of a rank that is for no exchange, wherever the others are, and is
not counted."""
UPDATE = "update."
"""How the names of exchanges begin that are the updates of an engine's own
optimizers, also in a compiled loop, which Python does not see."""


class ExchangeCounts:
    """The exchanges of this process; used by several threads.

    Python records its own when they begin and end. Those of a graph are counted
    in the graph.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._begun: collections.Counter[str] = collections.Counter()
        self._running: collections.Counter[str] = collections.Counter()
        self._of_graphs: dict[str, Callable[[], tuple[int, int]]] = {}
        self._settled: dict[str, int] = {}

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Record, and count, the exchange of this block."""
        with self._lock:
            if name != SAVE:
                self._begun[name] += 1
            self._running[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[name] -= 1

    def add(self, name: str, count: Callable[[], tuple[int, int]]) -> None:
        """Count the exchanges that graphs make under a name.

        Args:
            name: of these exchanges, the same on all ranks.
            count: returns how many of them have begun and have ended.
        """
        with self._lock:
            self._of_graphs[name] = count

    def settle(self) -> None:
        """Record that no graph runs: cancelled exchanges have ended, too."""
        with self._lock:
            of_graphs = dict(self._of_graphs)
        self._settled = {name: count()[0] for name, count in of_graphs.items()}

    def read(self) -> tuple[collections.Counter[str], list[str], list[str]]:
        """Return how many exchanges have begun, and the names of running ones.

        The numbers by name. Of the running ones, first those that Python waits
        for, then those in graphs.
        """
        with self._lock:
            begun, of_graphs = self._begun.copy(), dict(self._of_graphs)
            running = [name for name, n in self._running.items() if n]
        in_graphs = []
        for name, count in of_graphs.items():
            begun_there, ended = count()
            begun[name] += begun_there
            if max(ended, self._settled.get(name, 0)) < begun_there:
                in_graphs.append(name)
        return begun, sorted(running), sorted(in_graphs)


class ThisRank:
    """What this process knows of itself in its job; used by several threads.

    Attributes:
        exchanges: the exchanges of this process.
        watch: its ``StallWatch``; None: it has no other ranks to watch.
        rank0_name: the name of rank 0 if our launcher did not start the job. A
            helper process then sends each rank's heartbeat, and rank 0's serves
            the store, and knows which ranks are gone.
        marks: how many actions were marked.
        action: the last of them; empty outside of training.
        waits: whether the action may take long because of other ranks.
        is_over: whether the rank is known to do something else since.
        is_counted: whether it waits for them in exchanges that are counted.
        does: what this rank does in an exchange, to follow "rank 0"; empty:
            the action says it.
        since: when the action began, by ``time.monotonic``.
        round: how often the ranks have connected again.
        marked: the actions that were marked before this round.
        exchanged: the exchanges that began before it, by name.
        in_order: whether all ranks make the same exchanges, which they do until
            a call has failed.
        running: collectives in other threads, for which the rank waits and
            can stop waiting.
        thread: that other thread; None: no rank was waited for yet.
    """

    thread: threading.Thread | None = None
    watch: Any = None
    rank0_name: str = ""

    def __init__(self):
        self.exchanges: ExchangeCounts = ExchangeCounts()
        self.running: list[InThread[Any]] = []
        self._refusing: list[Callable[[str], Exception]] = []
        self.marks = 0
        self.action = self.does = ""
        self.waits = self.is_counted = self.is_over = False
        self.since: float = time.monotonic()
        self.begin_round(0)

    def begin_round(self, number: int) -> None:
        """Begin to count again, as all ranks do when they have connected."""
        self.marked: int = self.marks
        self.exchanged: collections.Counter[str] = self.exchanges.read()[0]
        self.round, self.in_order = number, True

    def mark(self, action: str, exchanges: bool = False) -> None:
        """Record the next action of this rank, or what it waits for.

        Args:
            action: what it is; empty: it is outside of training.
            exchanges: whether it waits in exchanges that are counted, and
                otherwise computes; or else it does nothing but wait.
        """
        self.marks += 1
        self.action, self.waits = action, bool(action)
        self.is_counted, self.is_over = exchanges, False
        self.since = time.monotonic()

    def mark_done(self) -> None:
        """Record that the action marked last is done, with all exchanges."""
        self.waits, self.is_over = False, True

    def mark_over(self) -> None:
        """Record that the action is over, though exchanges may follow it."""
        self.is_over = True

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Record that this rank traces a step, for which other ranks wait."""
        action = f"the preparation of {self.action}" if self.action else ""
        with self.within(action):
            yield

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Record the action of this rank during the exchanges of a block."""
        before, self.does = self.does, what
        try:
            yield
        finally:
            self.does = before

    @contextlib.contextmanager
    def within(self, action: str, waits: bool = False) -> Iterator[None]:
        """Record an action that only this rank takes, as part of another."""
        before = self.action, self.waits, self.is_over
        self.action, self.waits, self.is_over = action, waits, False
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.action, self.waits, self.is_over = before
            self.since = time.monotonic()

    @property
    def refuse(self) -> Callable[[str], Exception] | None:
        """Return this rank's error, given which ranks have ended.

        None: starting again may help.
        """
        return self._refusing[-1] if self._refusing else None

    def refusal(self, ended: str) -> Exception:
        """Return the error of this rank, given which ranks have ended."""
        return TowerError(ended) if self.refuse is None else self.refuse(ended)

    @contextlib.contextmanager
    def refusing_by(self, refuse: Callable[[str], Exception]) -> Iterator[None]:
        """Record the error of this block if ranks have ended that it needs."""
        self._refusing.append(refuse)
        try:
            yield
        finally:
            self._refusing.remove(refuse)


this_rank = ThisRank()
mark = this_rank.mark
mark_done = this_rank.mark_done
mark_over = this_rank.mark_over
preparing = this_rank.preparing
within = this_rank.within
doing = this_rank.doing
refusing_by = this_rank.refusing_by
refusal = this_rank.refusal
