"""Threads of asynchronous towers, fed from one queue of batches."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.step.marks import StepRecorder
from keras_towers.replicas.tower_steps import Step, TowerSteps


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
    """One thread per tower, for the length of a ``fit``.

    Idle towers take batches from a shared queue, so a slow tower takes fewer
    and never blocks a fast one. The queue holds as many batches as there are
    towers, so that fast towers do not wait for data.

    All methods that wait raise any error of an earlier step, and TowerError if
    no step has ended for too long.

    Attributes:
        latest: the logs of the step that has ended last.
    """

    def __init__(
        self,
        towers: int,
        steps: TowerSteps,
        stall_shutdown_s: float | None = None,
        recorder: StepRecorder | None = None,
    ):
        self.latest: Any = None
        self._towers = towers
        self._steps = steps
        self._stall_shutdown_s = stall_shutdown_s
        self._recorder = recorder
        # Guards all attributes below, and is notified of every change.
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[Sequence[Step], Any]] = (
            collections.deque()
        )
        # The towers that are in a step.
        self._busy: set[int] = set()
        self._ended_steps = 0
        # The number of steps, by how many updates of other towers they missed.
        self._missed: collections.Counter[int] = collections.Counter()
        self._error: BaseException | None = None
        self._closed = False
        self._hangs = False
        self._threads: list[threading.Thread] = []

    def submit(self, traced: Sequence[Step], batch: Any) -> None:
        """Queue a batch for the next idle tower; wait while it is full."""
        with self._changed:
            self._wait(lambda: len(self._waiting) < self._towers)
            self._waiting.append((traced, batch))
            self._changed.notify_all()
        if not self._threads:
            self._start()

    def drain(self, whole: bool = True) -> None:
        """Wait until all submitted batches are done."""
        with self._changed:
            self._wait(lambda: not self._busy and not self._waiting)
        self._steps.wait_for_updates(whole)
        with self._changed:
            self._wait(lambda: True)

    def wait_for_a_step(self) -> None:
        """Wait until at least one step has ended."""
        with self._changed:
            self._wait(lambda: self.latest is not None)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait as long as steps end; called with the lock."""
        while self._error is None and not ready():
            ended = self._ended_steps

            def moves(ended: int = ended) -> bool:
                failed = self._error is not None
                return failed or ready() or self._ended_steps != ended

            if not self._changed.wait_for(moves, self._stall_shutdown_s):
                self._hangs = True
                raise TowerError(
                    f"no step has finished for {self._stall_shutdown_s:g} s: "
                    f"replicas {sorted(self._busy)} of {self._towers} are "
                    "running one. A device hangs, or a step is very slow: "
                    "raise stall_shutdown_s to wait longer."
                )
        if self._error is not None:
            raise self._error

    def take_staleness(self) -> Staleness:
        """Return the staleness recorded since the last call."""
        with self._changed:
            missed, self._missed = self._missed, collections.Counter()
        return Staleness(dict(sorted(missed.items())))

    def close(self) -> None:
        """End the threads once all batches are done or dropped by an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._threads:
            self._steps.release_threads()
        for index, thread in enumerate(self._threads):
            # None if Ctrl-C was pressed before it was started.
            if thread.ident is not None:
                # A thread that hangs never ends.
                thread.join(0 if self._hangs and index in self._busy else None)
        self._threads.clear()
        # Its traceback holds all objects of the fit call.
        self._error = None

    def _start(self) -> None:
        # Daemons, so that a second Ctrl-C exits without waiting for steps.
        # Stored before they start, so that Ctrl-C leaks no thread.
        self._threads += [
            threading.Thread(
                target=self._run,
                args=(index,),
                name=f"{NAME}-{index}",
                daemon=True,
            )
            for index in range(self._towers)
        ]
        self._steps.prepare(self._fail)
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        """Train on one tower, in its thread."""
        try:
            while self._steps.wait_for_turn(index) and self._train(index):
                pass
        except BaseException as error:
            self._fail(error)
        finally:
            with self._changed:
                self._busy.discard(index)
                self._changed.notify_all()

    def _train(self, index: int) -> bool:
        """Train on the next batch; return whether there was one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return False
            traced, batch = self._waiting.popleft()
            self._busy.add(index)
            read = self._ended_steps
            self._changed.notify_all()
        span: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._recorder is not None:
            span = self._recorder.span(index)
        with span:
            result = traced[index](batch)
        with self._changed:
            self._missed[self._ended_steps - read] += 1
            self._ended_steps += 1
            self.latest = result
            self._busy.discard(index)
            self._changed.notify_all()
        return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._waiting.clear()
            self._changed.notify_all()
