"""How the benchmark's processes time what they train."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

WARM_UP_BATCHES = 10
SHORT_EPOCHS = 5
SHORT_EPOCH_STEPS = 4
_SKIPPED_EPOCHS = 2


def differences(times: Sequence[float], over: int = 1) -> list[float]:
    """Return what lies between each time and a later one, for one step.

    Args:
        times: seconds.
        over: how many steps later. Towers that wait for nobody take batches in
            bursts: only over several rounds of them is a mean a rate.
    """
    pairs = zip(times, times[over:], strict=False)
    return [(end - begin) / over for begin, end in pairs]


def epoch_cost_s(epochs: Sequence[float], step_ms: Sequence[float]) -> float:
    """Return the seconds that an epoch costs beside its steps.

    Args:
        epochs: when each of ``SHORT_EPOCHS`` epochs of ``SHORT_EPOCH_STEPS``
            steps began, and the end.
        step_ms: milliseconds of single steps.
    """
    steps_s = SHORT_EPOCH_STEPS * statistics.median(step_ms) / 1e3
    return statistics.median(differences(epochs)[_SKIPPED_EPOCHS:]) - steps_s


def make_timer() -> Any:
    """Make a callback that notes when batches and epochs begin.

    From one begin to the next, so that handing over the data and the metrics
    counts too.
    """
    import keras

    class Timer(keras.callbacks.Callback):
        """Has the times since the last ``fit`` began."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.batches: list[float] = []
            self.epochs: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epochs.append(time.perf_counter())

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.batches.append(time.perf_counter())

        def on_train_end(self, logs: Any = None) -> None:
            self.epochs.append(time.perf_counter())

    return Timer()
