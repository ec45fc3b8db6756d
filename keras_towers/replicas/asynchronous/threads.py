"""Threads of asynchronous towers, fed from one queue of batches."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.fit.context.marks import Recorder
from keras_towers.replicas.asynchronous import staleness as staleness_lib
from keras_towers.replicas.asynchronous.schedule import UpdateSchedule

NAME = "keras_towers-async"


class TowerThreads:
    """One thread per tower, for the length of a ``fit``."""

    # Idle towers take batches from a shared queue, so a slow tower takes fewer
    # and never blocks a fast one. The queue holds as many batches as there are
    # towers, so that fast towers do not wait for data.

    def __init__(
        self,
        towers: int,
        schedule: UpdateSchedule,
        stall_shutdown_s: float | None = None,
        recorder: Recorder | None = None,
    ):
        self._towers = towers
        self._recorder = recorder
        self._schedule = schedule
        self._stall_shutdown_s = stall_shutdown_s
        # The towers that are in a step.
        self._busy: set[int] = set()
        self._ended_steps = 0
        self._hangs = False
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._progress = threading.Condition(lock)
        self._waiting: collections.deque[tuple] = collections.deque()
        self._closed = False
        self._begun = False
        self._error: BaseException | None = None
        self._clock = staleness_lib.Clock()
        self._threads: list[threading.Thread] = []
        self.latest: Any = None

    def submit(self, steps: Sequence[Callable[[Any], Any]], batch: Any) -> None:
        """Queue a batch for the next idle tower; wait while it is full."""
        # As all methods that wait, it raises any error of an earlier step, and
        # TowerError if no step has ended for too long.
        with self._progress:
            self._await(
                lambda: self._error or len(self._waiting) < self._towers
            )
            self._raise()
            self._waiting.append((steps, batch))
            self._work.notify()
        if not self._threads:
            self._start()

    def drain(self, whole: bool = True) -> None:
        """Wait until all submitted batches are done."""
        with self._progress:
            self._await(lambda: not self._busy and not self._waiting)
            self._raise()
        self._schedule.settle(whole)
        with self._progress:
            self._raise()

    def wait_for_a_step(self) -> None:
        """Wait until at least one step has ended."""
        with self._progress:
            self._await(lambda: self._error or self.latest is not None)
            self._raise()

    def _await(self, ready: Callable[[], Any]) -> None:
        """Wait as long as steps end; called with the lock."""
        while not ready():
            ended = self._ended_steps

            def moves(ended: int = ended) -> bool:
                return bool(ready()) or self._ended_steps != ended

            if not self._progress.wait_for(moves, self._stall_shutdown_s):
                self._hangs = True
                self._raise()
                raise TowerError(
                    f"no step has ended for {self._stall_shutdown_s:g} s: "
                    f"replicas {sorted(self._busy)} of {self._towers} are in "
                    "one. A device hangs, or a step is very slow; "
                    "stall_shutdown_s=..., in seconds, waits for longer."
                )

    def take_staleness(self) -> staleness_lib.Staleness:
        """Return the staleness recorded since the last call."""
        with self._work:
            return self._clock.take()

    def close(self) -> None:
        """End the threads once all batches are done, or dropped by an error."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        if self._begun:
            self._schedule.end()
            self._begun = False
        for index, thread in enumerate(self._threads):
            # None if a Ctrl-C came before it was started.
            if thread.ident is not None:
                # One that hangs never ends.
                thread.join(0 if self._hangs and index in self._busy else None)
        self._threads.clear()
        # Its traceback would keep all objects of the fit call alive.
        self._error = None

    def _start(self) -> None:
        # Recorded first, so that a Ctrl-C in between leaks no thread.
        self._begun = True
        self._schedule.begin(self._failed_elsewhere)
        for index in range(self._towers):
            # Daemons, so that a second Ctrl-C exits without waiting for steps.
            thread = threading.Thread(
                target=self._tower,
                args=(index,),
                name=f"{NAME}-{index}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _tower(self, index: int) -> None:
        while self._may_go_on(index) and (job := self._take(index)) is not None:
            steps, batch, read = job
            step = functools.partial(steps[index], batch)
            try:
                with self._recorded(index):
                    result = self._schedule.run(index, step)
            except BaseException as error:
                self._failed(index, error)
            else:
                self._ended(index, result, read)
            # Frees the batch while waiting for the next one.
            del job, steps, batch, step

    def _recorded(self, index: int) -> contextlib.AbstractContextManager[None]:
        if self._recorder is None:
            return contextlib.nullcontext()
        return self._recorder.span(index)

    def _may_go_on(self, index: int) -> bool:
        try:
            return self._schedule.enter(index)
        except BaseException as error:
            self._failed_elsewhere(error)
            return False

    def _take(self, index: int) -> tuple | None:
        with self._work:
            self._work.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            self._busy.add(index)
            self._progress.notify()
            return *self._waiting.popleft(), self._clock.read()

    def _ended(self, index: int, result: Any, read: int) -> None:
        with self._work:
            self._busy.discard(index)
            self._ended_steps += 1
            self._clock.update(read)
            self.latest = result
            self._progress.notify()

    def _failed(self, index: int, error: BaseException) -> None:
        with self._work:
            self._busy.discard(index)
        self._failed_elsewhere(error)

    def _failed_elsewhere(self, error: BaseException) -> None:
        with self._work:
            self._error = self._error or error
            self._waiting.clear()
            self._progress.notify()
