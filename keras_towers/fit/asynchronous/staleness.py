"""Staleness of asynchronous updates.

As in Hogwild! (Recht et al., 2011), it is the number of updates that other
towers apply between a step's read of the weights and its own update.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf


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


class Clock:
    """Counts updates and records the staleness of each step.

    Not thread-safe: callers have to hold a lock.
    """

    def __init__(self) -> None:
        self._updates = 0
        self._seen: collections.Counter[int] = collections.Counter()

    def read(self) -> int:
        """Return the number of updates so far, as a step reads the weights."""
        return self._updates

    def update(self, read: int) -> None:
        """Record the update of a step that got ``read`` from ``read()``."""
        self._seen[self._updates - read] += 1
        self._updates += 1

    def take(self) -> Staleness:
        """Return the staleness recorded since the last call."""
        seen, self._seen = self._seen, collections.Counter()
        return Staleness(dict(sorted(seen.items())))


class ToTensorBoard(keras.callbacks.Callback):
    """Writes the staleness of each epoch to TensorBoard.

    Args:
        boards: the ``TensorBoard`` callbacks of ``fit``.
        observed: returns the staleness of the epoch.
    """

    def __init__(
        self,
        boards: Sequence[keras.callbacks.TensorBoard],
        observed: Callable[[], Staleness],
    ):
        super().__init__()
        self._boards = boards
        self._observed = observed

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write mean, maximum and histogram."""
        staleness = self._observed()
        if not staleness.steps:
            return
        values = np.repeat(
            list(staleness.histogram), list(staleness.histogram.values())
        )
        for board in self._boards:
            with board._train_writer.as_default():
                tf.summary.scalar(
                    "epoch_staleness_mean", staleness.mean, step=epoch
                )
                tf.summary.scalar(
                    "epoch_staleness_max", staleness.max, step=epoch
                )
                tf.summary.histogram("staleness", values, step=epoch)
