"""When Keras's loop calls the train function, callbacks and validation."""

from __future__ import annotations

import threading
import time
from typing import Any

import keras
import numpy as np

from keras_towers.timeline.phases import Calls


class Host:
    """The times of one ``fit`` in Python, in seconds since 1970."""

    def __init__(self) -> None:
        # Keras may run callbacks behind a batch in other threads, later.
        self._thread = threading.get_ident()
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._nexts: list[float] = []
        # Validation and the ends of epochs: their names, begins and ends.
        self.others: list[tuple[str, float, float]] = []

    def begin_call(self) -> int:
        """The train function is called; return how often it was before."""
        now = time.time()
        if self._nexts and np.isnan(self._nexts[-1]):
            self._nexts[-1] = now
        self._begins.append(now)
        self._ends.append(np.nan)
        self._nexts.append(np.nan)
        return len(self._begins) - 1

    def end_call(self) -> None:
        """The train function has returned."""
        if threading.get_ident() == self._thread:
            self._ends[-1] = time.time()

    def end_calls(self) -> None:
        """No call follows in this epoch."""
        if self._nexts and np.isnan(self._nexts[-1]):
            ended = self._ends[-1]
            self._nexts[-1] = time.time() if np.isnan(ended) else ended

    def begin(self, name: str) -> None:
        """Something else begins."""
        self.others.append((name, time.time(), np.nan))

    def end(self) -> None:
        """It has ended, if it has not yet."""
        if self.others and np.isnan(self.others[-1][2]):
            name, begin, _ = self.others[-1]
            self.others[-1] = name, begin, time.time()

    def calls(self) -> Calls:
        """Return the times of all calls so far."""
        self.end_calls()
        times = self._begins, self._ends, self._nexts
        return Calls(*(np.array(t, np.float64) for t in times))


class First(keras.callbacks.Callback):
    """Runs before all other callbacks, and notes when.

    Attributes:
        host: what it notes it in.
    """

    async_safe: bool = True

    def __init__(self) -> None:
        super().__init__()
        self.host: Host = Host()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The train function has returned."""
        self.host.end_call()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Nothing of the last epoch follows."""
        self.host.end()

    def on_test_begin(self, logs: Any = None) -> None:
        """The validation begins."""
        self.host.end_calls()
        self.host.begin("validation")

    def on_test_end(self, logs: Any = None) -> None:
        """It has ended."""
        self.host.end()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Callbacks end the epoch."""
        self.host.end_calls()
        self.host.begin("callbacks")

    def on_train_end(self, logs: Any = None) -> None:
        """They have done so."""
        self.host.end()
