"""BatchNormalization with the statistics of the global batch.

Keras's own synchronized statistics, mean(x^2) - mean(x)^2, cancel where the
mean is large, and ignore masks. Here the mean comes first and the squared
deviations from it second, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from keras_towers.fit import contract
from keras_towers.fit.step import gather as gather_lib


def moments(
    original: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Replace ``BatchNormalization._moments`` on a tower.

    Returns:
        Mean and variance of each channel.
    """
    strategy = contract.in_force()
    if strategy is None or not (
        layer.synchronized or strategy._components.config.batch_norm == "global"
    ):
        return original(layer, inputs, mask)
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
