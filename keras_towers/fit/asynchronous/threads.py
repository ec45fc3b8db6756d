"""Threads of asynchronous towers, each running the next batch that waits."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

from keras_towers.fit.asynchronous import staleness as staleness_lib

NAME = "keras_towers-async"


class TowerThreads:
    """One thread for each tower, for as long as a ``fit`` runs.

    Batches wait in one line, and a tower that is free takes the first: a slow
    tower takes fewer and holds nobody up. As many may wait as there are towers,
    so that no fast one has to wait for the data.

    Args:
        towers: how many.

    Attributes:
        latest: what the step that ended last has returned; None before.
    """

    def __init__(self, towers: int):
        self._towers = towers
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._progress = threading.Condition(lock)
        self._waiting: collections.deque[tuple] = collections.deque()
        self._running = 0
        self._closed = False
        self._error: BaseException | None = None
        self._clock = staleness_lib.Clock()
        self._threads: list[threading.Thread] = []
        self.latest: Any = None

    def submit(self, steps: Sequence[Callable[[Any], Any]], batch: Any) -> None:
        """Give a batch to the next tower that is free.

        Returns at once, unless as many batches as there are towers wait.

        Args:
            steps: the step of every tower.
            batch: what the one that takes it is called with.

        Raises:
            BaseException: what an earlier step has raised on its tower.
        """
        with self._progress:
            self._progress.wait_for(
                lambda: self._error or len(self._waiting) < self._towers
            )
            self._raise()
            self._waiting.append((steps, batch))
            self._work.notify()
        if not self._threads:
            self._start()

    def drain(self) -> None:
        """Wait until every batch that was submitted is done.

        Raises:
            BaseException: what a step has raised on its tower.
        """
        with self._progress:
            self._progress.wait_for(
                lambda: not self._running and not self._waiting
            )
            self._raise()

    def wait_for_a_step(self) -> None:
        """Wait until some step has ended.

        Raises:
            BaseException: what a step has raised on its tower.
        """
        with self._progress:
            self._progress.wait_for(
                lambda: self._error or self.latest is not None
            )
            self._raise()

    def take_staleness(self) -> staleness_lib.Staleness:
        """What was observed since the last call."""
        with self._work:
            return self._clock.take()

    def close(self) -> None:
        """End the threads, once what was submitted is done.

        After an error on a tower, what still waits is dropped.
        """
        with self._work:
            self._closed = True
            self._work.notify_all()
        for thread in self._threads:
            # None: a Ctrl-C came before it was started.
            if thread.ident is not None:
                thread.join()
        self._threads.clear()
        # A traceback would keep the whole call of fit alive.
        self._error = None

    def _start(self) -> None:
        for index in range(self._towers):
            # Daemons: a second Ctrl-C leaves without waiting for their steps.
            thread = threading.Thread(
                target=self._tower,
                args=(index,),
                name=f"{NAME}-{index}",
                daemon=True,
            )
            # Noted first, so that a Ctrl-C in between leaves none behind.
            self._threads.append(thread)
            thread.start()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _tower(self, index: int) -> None:
        while (job := self._take()) is not None:
            steps, batch, read = job
            try:
                result = steps[index](batch)
            except BaseException as error:
                self._failed(error)
            else:
                self._ended(result, read)
            # Until the next batch comes, nothing of this one is kept.
            del job, steps, batch

    def _take(self) -> tuple | None:
        with self._work:
            self._work.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            self._running += 1
            self._progress.notify()
            return *self._waiting.popleft(), self._clock.read()

    def _ended(self, result: Any, read: int) -> None:
        with self._work:
            self._running -= 1
            self._clock.update(read)
            self.latest = result
            self._progress.notify()

    def _failed(self, error: BaseException) -> None:
        with self._work:
            self._running -= 1
            self._error = self._error or error
            self._waiting.clear()
            self._progress.notify()
