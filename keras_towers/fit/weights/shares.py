"""How much each tower's own state counts in that of one device.

A tower's moving statistics, averages made by hand and the like describe its
part of the batch. Where the parts differ in size, the mean over the towers has
to be weighted by the towers' shares of the batch. As long as all batches are
divided alike, such a mean may be taken once, at the end; only where the shares
change, the states have to be averaged before the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.contract import TowerConfig


class BatchShares:
    """The towers' shares of the last global batch.

    Args:
        config: the towers.
    """

    def __init__(self, config: TowerConfig):
        self._config = config
        self._counts: tf.Variable | None = None

    @property
    def _last(self) -> tf.Variable:
        """Each tower's part of the last batch; 0 if all states are equal."""
        if self._counts is None:
            with (
                tf.init_scope(),
                compat.single_device_mode(),
                tf.device("CPU:0"),
            ):
                self._counts = tf.Variable(
                    tf.zeros([self._config.num_replicas], tf.int64),
                    trainable=False,
                    name="last_batch",
                )
        return self._counts

    def weights(self) -> tf.Tensor | None:
        """Return the K weights of this process's towers, of mean 1 over all.

        None if all towers weigh the same.
        """
        if self._counts is None:
            return None
        counts = self._counts.read_value()
        if tf.executing_eagerly() and not _are_uneven(counts):
            return None
        weights = tf.cast(tf.where(_are_uneven(counts), counts, 1), tf.float32)
        weights /= tf.reduce_mean(weights)
        first = self._config.first_tower
        return weights[first : first + self._config.num_towers]

    def begin_step(self, parts: Any, average: Callable[[], None]) -> Any:
        """Average the towers' states if the shares are about to change.

        Args:
            parts: the parts of the batch that all towers get: R numbers.
            average: averages them, eagerly.

        Returns:
            A tensor on which the step has to depend.
        """
        last = self._last.read_value()
        parts = tf.cast(tf.stack(parts), tf.int64)

        def averaged() -> int:
            average()
            return 0

        changed = tf.reduce_any(parts != last) & (
            _are_uneven(parts) | _are_uneven(last)
        )
        if tf.executing_eagerly():
            return averaged() if changed else 0
        return tf.cond(
            changed,
            lambda: tf.py_function(averaged, [], tf.int32),
            lambda: tf.constant(0),
        )

    def end_step(self, parts: Any) -> None:
        """Record the parts of a batch that the towers got."""
        parts = tf.cast(tf.stack(parts), tf.int64)
        self._last.assign(parts, read_value=False)

    def forget(self) -> None:
        """Record that the towers' states are equal."""
        if self._counts is not None:
            self._counts.assign(tf.zeros_like(self._counts), read_value=False)


def _are_uneven(counts: tf.Tensor) -> tf.Tensor:
    return tf.reduce_any(counts != counts[0])
