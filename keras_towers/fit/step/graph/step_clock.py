"""Marks in a training step: the times at which towers reach certain points.

A mark is an operation that reads the clock once other operations have ended.
The times go into a queue, which is read between steps. A tower starts to
compute after its first mark, so the time it waits for a core does not count.
Nothing waits for the other marks. Only steps that are traced while a
``StepRecorder`` records have marks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.data.batches import tensors_in
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Structure
from keras_towers.transport import devices as devices_lib

Point = Literal["begun", "computed", "reduced", "updated"]
# In the order in which a step reaches them.
POINTS: tuple[Point, ...] = ("begun", "computed", "reduced", "updated")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


class StepRecorder:
    """Records the steps of one model.

    The ``spans`` are the recorded steps of towers that run independently:
    tower, begin and end, in seconds since 1970.
    """

    def __init__(self, model: keras.Model, kept: int):
        self.traces: int = 0
        self.count: int = 0
        self.spans: deque[tuple[int, float, float]] = deque(maxlen=kept)
        self.model = model
        self._kept = kept
        self._lock = threading.Lock()
        self._marks: list[StepMarks] = []
        self._steps = _in_order([])

    def begin_trace(self, devices: Sequence[str]) -> StepMarks:
        """Return the marks for one trace of the step."""
        self.traces += 1
        marks = StepMarks(devices)
        self._marks.append(marks)
        return marks

    @contextlib.contextmanager
    def span(self, tower: int) -> Iterator[None]:
        """Record a step that a tower runs in this block, in any thread."""
        begin = time.time()
        yield
        with self._lock:
            self.spans.append((tower, begin, time.time()))
            self.count += 1

    def read(self) -> np.ndarray:
        """Read the times of the steps that have ended.

        Returns:
            The times of the latest steps, in seconds since 1970, of shape
            [steps, towers, points]; NaN for points that a tower does not reach.
            With several optimizers a tower reaches some points more than once:
            the last time counts.
        """
        steps = _in_order([marks.take_times() for marks in self._marks])
        self.count += len(steps)
        self._steps = _in_order([self._steps, steps])[-self._kept :]
        return self._steps


class StepMarks:
    """The marks in one trace of a step.

    Their operations are added at the end of the graph: a random operation
    without a seed derives one from the number of operations before it.
    """

    def __init__(self, devices: Sequence[str]):
        self._graph = compat.get_default_graph()
        self._devices = devices
        # For each tower: the points, and the tensors each mark waits for.
        self._marks: list[list[tuple[Point, list[Any]]]] = [[] for _ in devices]
        self._queues: list[tf.queue.FIFOQueue] = []
        # By tower: the number of operations before its updates.
        self._updates_after: dict[int, int] = {}

    def add(self, tower: int, point: Point, ends: Sequence[object]) -> None:
        """Note a mark of a tower, and the operations that it waits for."""
        if compat.get_default_graph() is self._graph:
            self._marks[tower].append((point, list(ends)))
            if point == "reduced":
                before = len(self._graph.get_operations())
                self._updates_after.setdefault(tower, before)

    def finish(self) -> None:
        """Add the operations of the marks.

        What changes after gradients are added up is an update.
        """
        operations = self._graph.get_operations()
        for tower, start in self._updates_after.items():
            changes = [o for o in operations[start:] if o.op_def.is_stateful]
            self.add(tower, "updated", changes)
        for device, marks in zip(self._devices, self._marks, strict=True):
            host = _host_of(device)
            with compat.outside(host):
                # Unbounded: a full queue would block the training.
                queue = tf.queue.FIFOQueue(-1, [tf.float64], [[len(marks)]])
            self._queues.append(queue)
            with tf.device(host):
                times = [_time_of(ends, device) for _, ends in marks]
                queue.enqueue(tf.stack(times))
            _, first = marks[0]
            self._begin_after(times[0].op, first)

    def _begin_after(
        self, mark: tf.Operation, pieces: Sequence[tf.Tensor]
    ) -> None:
        """Make a tower that calls its step as a function wait for a mark.

        Single operations get no control dependency: TensorFlow does not fuse
        operations that have one, and fusion changes rounding.
        """
        for operation in {o for piece in pieces for o in piece.consumers()}:
            if operation.type in _CALLS:
                operation._add_control_input(mark)

    def take_times(self) -> np.ndarray:
        """Return the times of the steps since the last call."""
        count = min((int(queue.size()) for queue in self._queues), default=0)
        times = np.full((count, len(self._devices), len(POINTS)), np.nan)
        if count:
            for tower, queue in enumerate(self._queues):
                read = queue.dequeue_many(count).numpy()
                for (point, _), seconds in zip(
                    self._marks[tower], read.T, strict=True
                ):
                    column = times[:, tower, POINTS.index(point)]
                    np.fmax(column, seconds, out=column)
        return times


def _time_of(ends: Sequence[object], device: str) -> tf.Tensor:
    """Return the time at which the host sees that operations have ended."""
    if device != _host_of(device):
        # TensorFlow regards an accelerator's operation as ended once its work
        # is queued. Work is done in order, so a value that is queued later
        # arrives after the work is done.
        with tf.control_dependencies(ends), tf.device(device):
            later = tf.random.uniform([], seed=1)
        seen = compat.hidden_variable(0.0, device=_host_of(device))
        ends = [seen.assign(later, read_value=False)]
    with tf.control_dependencies(ends):
        now = tf.timestamp()
    compat.run_independently(now.op)
    return now


_recorder: ThreadLocal[StepRecorder] = ThreadLocal()
_marks: ThreadLocal[StepMarks] = ThreadLocal()


# Records the steps that this thread traces in a block.
recording = _recorder.holding


def recorder_of(model: keras.Model | None) -> StepRecorder | None:
    """Return the recorder of a model's steps, or None."""
    recorder = _recorder.get()
    return recorder if recorder and recorder.model is model else None


@contextlib.contextmanager
def marked(
    model: keras.Model | None,
    devices: Sequence[str],
    pieces: Sequence[Structure],
) -> Iterator[None]:
    """Mark the step that is traced in this block, if it is recorded."""
    recorder = recorder_of(model)
    if recorder is None or tf.executing_eagerly():
        with _marks.holding(None):
            yield
        return
    marks = recorder.begin_trace(devices)
    with _marks.holding(marks):
        for tower, piece in enumerate(pieces):
            reached(tower, "begun", piece)
        yield
    marks.finish()


def reached(tower: int, point: Point, ends: Structure) -> None:
    """Mark that a tower reaches a point, once some tensors are computed."""
    marks = _marks.get()
    if marks is not None:
        marks.add(tower, point, tensors_in(ends))


def _in_order(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Merge the step times of several traces."""
    parts = [times for times in parts if len(times)]
    if not parts:
        return np.empty((0, 0, len(POINTS)))
    steps = np.concatenate(parts)
    return steps[np.argsort(steps[:, 0, 0], kind="stable")]


def _host_of(device: str) -> str:
    on_host = devices_lib.all_on_host([device])
    return device if on_host else devices_lib.host_of(device)
