"""BatchNormalization with the statistics of the global batch.

Keras's own synchronized statistics, mean(x^2) - mean(x)^2, cancel where the
mean is large, and ignore masks. Here the mean comes first and the squared
deviations from it second, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import contract
from keras_towers.fit.context import tower as tower_lib
from keras_towers.splitting import marks


def moments(
    original: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Replace ``BatchNormalization._moments`` on a tower."""
    strategy = contract.in_force()
    if strategy is None or not (
        layer.synchronized or strategy._components.config.batch_norm == "global"
    ):
        tower = tower_lib.with_a_share()
        if tower is not None:
            tower.note_alone("batch_norm", layer.name)
            if tower.graph is not None:
                # That is told; the analysis is to find what else differs.
                given = [inputs] if mask is None else [inputs, mask]
                mean, variance = marks.taken_for_granted(
                    lambda x, mask=None: original(layer, x, mask), given
                )
                return mean, variance
        return original(layer, inputs, mask)
    from keras_towers.fit.step import gather as gather_lib

    context = gather_lib.replica_context("batch_norm")
    if context is None:
        return original(layer, inputs, mask)
    axes = layer._reduction_axes
    if mask is None:
        present = None
        count = tf.reduce_prod([tf.shape(inputs)[axis] for axis in axes])
        nothing = 0.0
    else:
        present = tf.cast(tf.expand_dims(mask, -1), tf.bool)
        present = tf.broadcast_to(present, tf.shape(inputs))
        count = tf.math.count_nonzero(present, axes, keepdims=True)
        # As Keras does.
        nothing = keras.config.epsilon()

    def summed(values: tf.Tensor) -> tf.Tensor:
        if present is not None:
            values = tf.where(present, values, 0)
        return tf.reduce_sum(values, axes, keepdims=True)

    total, count = gather_lib.all_reduce_sum(
        context, [summed(inputs), tf.cast(count, inputs.dtype)]
    )
    mean = tf.math.divide_no_nan(total, count + nothing)
    # Where nothing is masked, gradients cancel out, and TensorFlow stops them.
    centre = tf.stop_gradient(mean) if present is None else mean
    squares = gather_lib.all_reduce_sum(
        context, summed(tf.math.squared_difference(inputs, centre))
    )
    variance = tf.math.divide_no_nan(squares, count + nothing)
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


class PooledBatchNormalization(keras.layers.BatchNormalization):
    """``BatchNormalization`` whose statistics several processes pool."""

    def gathered(self, statistics: tf.Tensor) -> tf.Tensor:
        """Concatenate the processes' rows, [1, 3, channels], with gradients."""
        raise NotImplementedError

    # Keras's statistics of each process, and the number of their values, are
    # combined by the rule of Chan, Golub and LeVeque, which does not cancel
    # where the mean is large.
    def _moments(
        self, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        moments = super()._moments(inputs, mask)
        if compat.in_stateless_scope():  # Keras finds out a shape.
            return moments
        mean, variance = (tf.reshape(moment, [-1]) for moment in moments)
        if mask is None:
            values = tf.size(inputs)
        else:
            of_one = tf.size(inputs) // tf.maximum(tf.size(mask), 1)
            values = of_one * tf.math.count_nonzero(mask, dtype=tf.int32)
        count = tf.cast(values / tf.size(mean), mean.dtype)
        # In a loop no exchange begins before the last step's has ended.
        with tf.control_dependencies([self.moving_mean._value.read_value()]):
            mine = tf.stack([mean, variance, tf.ones_like(mean) * count])
        everyone = self.gathered(mine[tf.newaxis])
        means, variances, counts = tf.unstack(everyone, axis=1)
        shares = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, 0))
        mean = tf.reduce_sum(shares * means, 0)
        apart = tf.math.squared_difference(means, mean)
        return mean, tf.reduce_sum(shares * (variances + apart), 0)
