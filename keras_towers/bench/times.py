"""What is recorded while a process of the benchmark trains."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Times:
    """What was recorded while training.

    Attributes:
        batches: the times at which batches started.
        epochs: the times at which epochs started, and training ended; a custom
            loop has none, because nothing happens at their end.
        loss: the mean loss of the last epoch.
        losses: the loss of each step of the last epoch, if steps wait for it.
        first_step_s: the seconds until the end of the first batch, if steps
            wait for their loss.
    """

    batches: list[float]
    epochs: list[float] = field(default_factory=list)
    loss: float | None = None
    losses: list[float] = field(default_factory=list)
    first_step_s: float | None = None


def make_recorder(waits: bool) -> Any:
    """Create a callback that records the times of one call of ``fit``.

    Times from start to start include the handling of data and metrics.

    Args:
        waits: whether every step waits for its loss, which is recorded.
    """
    import keras

    class Recorder(keras.callbacks.Callback):
        """Records when batches and epochs start."""

        def __init__(self) -> None:
            super().__init__()
            self.batches: list[float] = []
            self.epochs: list[float] = []
            self.means: list[float] = []
            self.first_end: float | None = None

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epochs.append(time.perf_counter())
            self.means.clear()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.batches.append(time.perf_counter())

        def on_train_end(self, logs: Any = None) -> None:
            self.epochs.append(time.perf_counter())

        def times(self, start: float, loss: float) -> Times:
            """Return what was recorded of a call that began at ``start``."""
            end, losses = self.first_end, step_losses(self.means)
            first_step_s = None if end is None else end - start
            return Times(self.batches, self.epochs, loss, losses, first_step_s)

    class WaitingRecorder(Recorder):
        """Also reads each loss; Keras waits for callbacks that do."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if logs:
                self.means.append(float(logs["loss"]))
            if self.first_end is None:
                self.first_end = time.perf_counter()

    return WaitingRecorder() if waits else Recorder()


def step_losses(means: list[float]) -> list[float]:
    """Return the loss of each step, given the mean up to each step."""
    sums = [step * mean for step, mean in enumerate(means, 1)]
    return [
        total - before
        for total, before in zip(sums, [0.0, *sums], strict=False)
    ]
