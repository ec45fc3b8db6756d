"""The staleness of asynchronous steps: measured, not bounded.

It is the number of updates between the read of the weights and the update that
a step computes from them. ``tower_threads.py`` counts it. Of averaged
gradients, ``accumulators.py`` drops those of an earlier update.
"""

from __future__ import annotations

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

    def write(self, epoch: int) -> None:
        """Write mean, maximum and histogram of an epoch to TensorBoard."""
        if not self.steps:
            return
        values = np.repeat(list(self.histogram), list(self.histogram.values()))
        tf.summary.scalar("epoch_staleness_mean", self.mean, step=epoch)
        tf.summary.scalar("epoch_staleness_max", self.max, step=epoch)
        tf.summary.histogram("staleness", values, step=epoch)
