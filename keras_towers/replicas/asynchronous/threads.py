"""Threads of asynchronous towers, fed from one queue of batches."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.context.marks import Recorder
from keras_towers.replicas.asynchronous.tower_steps import UpdateSchedule


@dataclasses.dataclass(frozen=True)
class Staleness:
    """The staleness of the steps of one epoch, in updates.

    Attributes:
        histogram: number of steps, by staleness.

    Example:
        >>> with keras_towers.AsyncTowerStrategy(4) as strategy:
        ...     model.fit(x, y)
        >>> strategy.staleness.mean
        2.9
    """

    histogram: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return sum(self.histogram.values())

    @property
    def mean(self) -> float:
        """Mean staleness; 0 without steps."""
        total = sum(value * count for value, count in self.histogram.items())
        return total / max(self.steps, 1)

    @property
    def max(self) -> int:
        """Maximum staleness; 0 without steps."""
        return max(self.histogram, default=0)

    def __str__(self) -> str:
        return f"mean {self.mean:.2f}, max {self.max} over {self.steps} steps"


def write_staleness(staleness: Staleness, epoch: int) -> None:
    """Write mean, maximum and histogram of an epoch to TensorBoard."""
    if not staleness.steps:
        return
    values = np.repeat(
        list(staleness.histogram), list(staleness.histogram.values())
    )
    tf.summary.scalar("epoch_staleness_mean", staleness.mean, step=epoch)
    tf.summary.scalar("epoch_staleness_max", staleness.max, step=epoch)
    tf.summary.histogram("staleness", values, step=epoch)


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
        # Steps by how many updates of others each has missed.
        self._missed: collections.Counter[int] = collections.Counter()
        self._threads: list[threading.Thread] = []
        self.latest: Any = None

    def submit(self, steps: Sequence[Callable[[Any], Any]], batch: Any) -> None:
        """Queue a batch for the next idle tower; wait while it is full.

        As all methods that wait, it raises any error of an earlier step, and
        TowerError if no step has ended for too long.
        """
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

    def take_staleness(self) -> Staleness:
        """Return the staleness recorded since the last call."""
        with self._work:
            missed, self._missed = self._missed, collections.Counter()
        return Staleness(dict(sorted(missed.items())))

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
            return *self._waiting.popleft(), self._ended_steps

    def _ended(self, index: int, result: Any, read: int) -> None:
        with self._work:
            self._busy.discard(index)
            self._missed[self._ended_steps - read] += 1
            self._ended_steps += 1
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
