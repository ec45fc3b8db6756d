"""Recordings of a ``fit``: of one rank, and of all on one clock."""

from __future__ import annotations

import dataclasses
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_towers.fit.context import marks, traced
from keras_towers.timeline.phases import Calls, latest

HOST = 0
"""The row of a rank's host in the trace."""


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
        # Keras may run callbacks after a batch in other threads, later.
        self._thread = threading.get_ident()
        self._count_traces = traces
        self._traces_before = 0
        self._calls: deque[list[float]] = deque(maxlen=kept)
        self._is_open = False
        self._other: tuple[str, float] | None = None

    def begin_call(self) -> int:
        """Note a call of the train function; return the number before it."""
        now = time.time()
        self._close(now)
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

    on_epoch_begin = on_test_end = on_train_end = end

    def end_fit(self) -> None:
        """Note the end of ``fit``."""
        self._end_calls()
        self.end()

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
        if self._count_traces() > self._traces_before:
            self.traces += 1
            self.traced.append(call[0])


@dataclasses.dataclass
class OfRank:
    """Measurements of one rank; all times are in seconds since 1970."""

    rank: int
    machine: str
    devices: list[str]
    first_step: int
    first_call: int
    # As fit.context.marks.Recorder.steps returns them.
    stamps: np.ndarray
    # Towers, begins and ends of steps that are a tower's own: [steps, 3].
    spans: np.ndarray
    # The begins of the calls that traced the step.
    traced: np.ndarray
    # Of the train function: [3, calls].
    calls: np.ndarray
    # Names, begins and ends of validation and callbacks.
    others: list[Any]

    @classmethod
    def of(
        cls,
        rank: int,
        devices: Sequence[str],
        recorder: marks.Recorder,
        host: Host,
    ) -> OfRank:
        """Take over what was recorded on this rank."""
        stamps, calls = recorder.steps(), np.stack(host.calls())
        if np.isnan(stamps[..., marks.POINTS.index("computed")]).all():
            # Gradients of these steps go other ways than through marks.
            stamps = stamps[:0]
        return cls(
            rank,
            platform.node(),
            [traced.short_name(device) for device in devices],
            recorder.count - len(stamps),
            host.count - calls.shape[1],
            stamps,
            np.array(recorder.spans, np.float64).reshape(-1, 3),
            np.array(host.traced, np.float64),
            calls,
            [list(other) for other in host.others],
        )

    def keep(self, begin: int, end: int) -> None:
        """Keep the steps from one, counted from the first, to another."""
        first, self.first_step = self.first_step, begin
        self.stamps = self.stamps[max(0, begin - first) : max(0, end - first)]

    def shift(self, seconds: float) -> None:
        """Set the rank's clock back."""
        self.stamps = self.stamps - seconds
        self.spans = self.spans - [0, seconds, seconds]
        self.traced = self.traced - seconds
        self.calls = self.calls - seconds
        self.others = [[n, b - seconds, e - seconds] for n, b, e in self.others]


def align(ranks: Sequence[OfRank]) -> None:
    """Cut ranks to the steps of all, and set them to the clock of rank 0."""
    begin = max(of.first_step for of in ranks)
    end = min(of.first_step + len(of.stamps) for of in ranks)
    for of in ranks:
        of.keep(begin, end)
    # The clocks of machines differ by more than a step takes. But gradients are
    # summed on all ranks at nearly the same moment.
    point = marks.POINTS.index("reduced")
    sums = [latest(of.stamps[:, :, 0, point], axis=1) for of in ranks]
    for of, its in zip(ranks, sums, strict=True):
        if of.machine != ranks[0].machine and len(its):
            of.shift(float(np.median(its - sums[0])))


def joined(ranks: Sequence[OfRank]) -> np.ndarray:
    """Join the stamps of the towers of ranks that have the same steps."""
    updates = min(of.stamps.shape[2] for of in ranks)
    return np.concatenate([of.stamps[:, :, :updates] for of in ranks], axis=1)


def towers_of(ranks: Sequence[OfRank]) -> list[tuple[int, int]]:
    """Rank and local index of each tower."""
    return [(of.rank, k) for of in ranks for k in range(len(of.devices))]


def rows_of(ranks: Sequence[OfRank]) -> dict[tuple[int, int], str]:
    """Names of the rows of the trace, by rank and row."""
    rows = {(of.rank, HOST): "input and callbacks" for of in ranks}
    devices = [device for of in ranks for device in of.devices]
    for index, (rank, local) in enumerate(towers_of(ranks)):
        rows[rank, 1 + local] = f"tower {index} ({devices[index]})"
    return rows
