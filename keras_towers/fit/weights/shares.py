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
        self._total: tf.Variable | None = None

    @property
    def _last(self) -> tf.Variable:
        """Examples of the last batch; 0 if the towers' states are equal."""
        if self._total is None:
            with (
                tf.init_scope(),
                compat.single_device_mode(),
                tf.device("CPU:0"),
            ):
                self._total = tf.Variable(
                    0, dtype=tf.int64, trainable=False, name="last_batch"
                )
        return self._total

    def weights(self) -> tf.Tensor | None:
        """Return the K weights of this process's towers, of mean 1 over all.

        None if all towers weigh the same.
        """
        if self._total is None:
            return None
        replicas = self._config.num_replicas
        total = self._total.read_value()
        if tf.executing_eagerly() and int(total) % replicas == 0:
            return None
        towers = tf.range(replicas, dtype=tf.int64)
        counts = total // replicas + tf.cast(towers < total % replicas, "int64")
        counts = tf.where(total > 0, counts, 1)
        counts = tf.cast(counts, tf.float32)
        first = self._config.first_tower
        weights = counts / tf.reduce_mean(counts)
        return weights[first : first + self._config.num_towers]

    def begin_step(self, total: Any, average: Callable[[], None]) -> Any:
        """Average the towers' states if the shares are about to change.

        Args:
            total: number of examples of the batch, on all towers.
            average: averages them, eagerly.

        Returns:
            A tensor on which the step has to depend.
        """
        last = self._last.read_value()
        replicas = self._config.num_replicas

        def averaged() -> int:
            average()
            return 0

        total = tf.cast(total, tf.int64)
        uneven = (total % replicas != 0) | (last % replicas != 0)
        changed = (total != last) & uneven
        if tf.executing_eagerly():
            return averaged() if changed else 0
        return tf.cond(
            changed,
            lambda: tf.py_function(averaged, [], tf.int32),
            lambda: tf.constant(0),
        )

    def end_step(self, total: Any) -> None:
        """Record the number of examples of a batch."""
        self._last.assign(tf.cast(total, tf.int64), read_value=False)

    def forget(self) -> None:
        """Record that the towers' states are equal."""
        if self._total is not None:
            self._total.assign(0, read_value=False)
