"""The measurements of each rank, on one clock."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_towers.fit.step.graph import step_clock
from keras_towers.foundation.object_types import Logs

# Columns of a call in ``LoopClock``.
_RETURNED, _ENDED = 1, 2


class LoopClock(keras.callbacks.Callback):
    """Records when Keras's loop makes calls, in seconds since 1970.

    It runs before all other callbacks. ``Timeline`` runs after them, and calls
    ``begin_call`` and ``end_callbacks``.
    """

    # Let Keras call the callbacks after a batch later, in a thread.
    async_safe: bool = True

    def __init__(self) -> None:
        super().__init__()
        self.restart(1)

    def restart(self, kept: int) -> None:
        """Begin another ``fit``; keep only the last ``kept`` calls."""
        self._calls: deque[list[float]] = deque(maxlen=kept)
        self._is_between_epochs = False
        self._thread = threading.get_ident()

    def begin_call(self, traces: int) -> None:
        """Record that the train function is called, and traces before it."""
        now = time.time()
        if self._calls and not self._is_between_epochs:
            self._calls[-1][_ENDED] = now
        self._is_between_epochs = False
        self._calls.append([now, np.nan, np.nan, traces])

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Record that the train function has returned."""
        if threading.get_ident() == self._thread:
            self._calls[-1][_RETURNED] = time.time()

    def end_callbacks(self) -> None:
        """Record that the callbacks after a call have returned."""
        if threading.get_ident() == self._thread:
            self._calls[-1][_ENDED] = time.time()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Record that what follows belongs to no call."""
        self._end()
        self._is_between_epochs = True

    def _end(self) -> None:
        if self._calls and np.isnan(self._calls[-1][_ENDED]):
            self._calls[-1][_ENDED] = time.time()

    def calls(self, traces: int) -> np.ndarray:
        """Return the fields of ``StepTimes`` for the kept calls, after ``fit``.

        Args:
            traces: how often the step was traced.
        """
        self._end()
        calls = np.array(self._calls, np.float64).reshape(-1, 4).T
        calls[3] = np.diff(calls[3], append=traces) > 0
        return calls


@dataclasses.dataclass
class RankRecording:
    """Measurements of one rank; all times are in seconds since 1970.

    Attributes:
        rank: the rank.
        machine: its name.
        devices: short names of its towers' devices.
        first_step: the number of the first step in ``stamps``.
        stamps: times of steps, as ``marks.StepRecorder.read`` returns them.
        spans: tower, begin and end of each step, if towers have no common one.
        calls: the four arrays of ``StepTimes``.
    """

    rank: int
    machine: str
    devices: list[str]
    first_step: int
    stamps: np.ndarray
    spans: np.ndarray
    calls: np.ndarray


def align_clocks(ranks: Sequence[RankRecording]) -> None:
    """Cut ranks to their common steps, and shift them to rank 0's clock."""
    begin = max(rank.first_step for rank in ranks)
    end = min(rank.first_step + len(rank.stamps) for rank in ranks)
    for rank in ranks:
        kept = slice(begin - rank.first_step, max(begin, end) - rank.first_step)
        rank.stamps = rank.stamps[kept]
        rank.first_step = begin
    # The clocks of machines differ by more than a step takes. But gradients are
    # summed on all ranks at nearly the same moment.
    point = step_clock.POINTS.index("reduced")
    sums = [latest(rank.stamps[..., point], axis=1) for rank in ranks]
    for rank, summed in zip(ranks, sums, strict=True):
        if rank.machine != ranks[0].machine and len(summed):
            fast_s = float(np.median(summed - sums[0]))
            rank.stamps = rank.stamps - fast_s
            rank.spans = rank.spans - [0, fast_s, fast_s]
            # The last row is not a time.
            rank.calls = rank.calls - [[fast_s], [fast_s], [fast_s], [0]]


def join_stamps(ranks: Sequence[RankRecording]) -> np.ndarray:
    """Join the stamps of the towers of aligned ranks."""
    return np.concatenate([rank.stamps for rank in ranks], axis=1)


def tower_names(ranks: Sequence[RankRecording]) -> list[str]:
    """Return the names of the towers of all ranks."""
    devices = [device for rank in ranks for device in rank.devices]
    return [f"tower {k} ({device})" for k, device in enumerate(devices)]


def latest(times: np.ndarray, **options: Any) -> np.ndarray:
    """The maximum without NaN; NaN where there is nothing else."""
    return np.fmax.reduce(times, initial=np.nan, **options)
