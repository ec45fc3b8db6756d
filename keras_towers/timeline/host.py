"""When Keras's loop calls the train function, callbacks and validation."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_towers.timeline.phases import Calls

# The parts of ``fit``, which make up all of it, and what some of them are.
PARTS = {
    "steps": "",
    "start": "until the first step: the model is placed, the input opened",
    "tracing": "the first steps, with TensorFlow's traces of them",
    "validation": "",
    "ends of epochs": "callbacks there",
    "between epochs": "the input is opened again; what ends fit",
}


class Host(keras.callbacks.Callback):
    """Times of one ``fit`` in Python, in seconds since 1970."""

    async_safe: bool = True

    def __init__(self, kept: int = 1, traces: Callable[[], int] = int) -> None:
        super().__init__()
        self.restart(kept, traces)

    def restart(self, kept: int, traces: Callable[[], int]) -> None:
        """Begin another ``fit``."""
        self.count: int = 0
        self.traces: int = 0
        self.traced: deque[float] = deque(maxlen=kept)
        self.others: deque[tuple[str, float, float]] = deque(maxlen=kept)
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.first_validation: float = 0.0
        self.whole: float = 0.0
        # Keras may run callbacks after a batch in other threads, later.
        self._thread = threading.get_ident()
        self._began = time.time()
        self._count_traces = traces
        self._traces_before = 0
        self._calls: deque[list[float]] = deque(maxlen=kept)
        self._is_open = False
        self._other: tuple[str, float] | None = None

    def begin_call(self) -> int:
        """Note a call of the train function; return the number before it."""
        now = time.time()
        self._close(now)
        if not self.count:
            self.seconds["start"] = now - self._began
        self._traces_before = self._count_traces()
        self._calls.append([now, np.nan, np.nan])
        self._is_open = True
        self.count += 1
        return self.count - 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note that the train function has returned."""
        if threading.get_ident() == self._thread:
            self._calls[-1][1] = time.time()

    def end_callbacks(self) -> None:
        """Note that the callbacks after a batch have run."""
        if threading.get_ident() == self._thread:
            self._calls[-1][2] = time.time()

    def on_test_begin(self, logs: Any = None) -> None:
        """Note the begin of the validation."""
        self._begin("validation")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the begin of the callbacks that end the epoch."""
        self._begin("callbacks")

    def end(self, *_: Any) -> None:
        """Note the end of validation, or of callbacks, if any has begun."""
        if self._other is None:
            return
        (name, begin), end = self._other, time.time()
        self._other = None
        self.others.append((name, begin, end))
        part = "validation" if name == "validation" else "ends of epochs"
        if name == "validation" and not self.seconds[part]:
            self.first_validation = end - begin
        self.seconds[part] += end - begin

    on_epoch_begin = on_test_end = on_train_end = end

    def end_fit(self) -> None:
        """Note the end of ``fit``."""
        self._end_calls()
        self.end()
        self.whole = time.time() - self._began
        rest = "between epochs" if self.count else "start"
        self.seconds[rest] += self.whole - sum(self.seconds.values())

    def calls(self) -> Calls:
        """Return the times of the calls that are kept."""
        times = np.array(self._calls, np.float64).reshape(-1, 3)
        return Calls(*times.T)

    def _begin(self, name: str) -> None:
        self._end_calls()
        self.end()
        self._other = name, time.time()

    def _end_calls(self) -> None:
        # No call follows in this epoch.
        if self._is_open:
            _, returned, ran = self._calls[-1]
            known = float(np.fmax(returned, ran))
            self._close(time.time() if np.isnan(known) else known)

    def _close(self, end: float) -> None:
        if not self._is_open:
            return
        self._is_open = False
        call = self._calls[-1]
        call[2] = end
        part = "steps"
        if self._count_traces() > self._traces_before:
            part = "tracing"
            self.traces += 1
            self.traced.append(call[0])
        self.seconds[part] += end - call[0]
