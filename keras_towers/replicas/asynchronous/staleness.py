"""Staleness of asynchronous updates.

As in Hogwild! (Recht et al., 2011), it is the number of updates that other
towers apply between a step's read of the weights and its own update.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

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
    """Counts updates and records each step's staleness; callers hold a lock."""

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
