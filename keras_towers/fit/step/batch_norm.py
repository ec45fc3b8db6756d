"""BatchNormalization with the statistics of each tower's rows.

For ``batch_norm="tower"``: it takes no exchange, and changes results. A layer
normalizes each example with the statistics of the rows of its tower; its moving
statistics take the means of these over all examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.context import traced
from keras_towers.partition.rules.means import own_mean


def call(
    original: Callable[..., Any],
    layer: keras.layers.BatchNormalization,
    inputs: Any,
    training: Any = None,
    mask: Any = None,
) -> Any:
    """Replace ``BatchNormalization.call`` in a step of training."""
    step = traced.current()
    alone = step is None or not step.training or not step.own_statistics
    first = inputs.shape.rank is not None and layer.axis % inputs.shape.rank
    if alone or not (training and layer.trainable) or mask is not None:
        return original(layer, inputs, training=training, mask=mask)
    if not first or layer.renorm:
        return original(layer, inputs, training=training, mask=mask)
    dtype = keras.backend.result_type(inputs.dtype, "float32")
    x = tf.cast(inputs, dtype)
    axes = [axis for axis in layer._reduction_axes if axis != 0]

    def moment(values: tf.Tensor) -> tf.Tensor:
        if axes:
            values = tf.reduce_mean(values, axes, keepdims=True)
        return own_mean(values)

    mean = moment(x)
    variance = moment(tf.math.squared_difference(x, tf.stop_gradient(mean)))
    for moving, now in (
        (layer.moving_mean, mean),
        (layer.moving_variance, variance),
    ):
        whole = tf.reshape(tf.reduce_mean(now, 0), [-1])
        before = tf.cast(moving, dtype)
        moving.assign(before * layer.momentum + whole * (1.0 - layer.momentum))
    shape = [1] * x.shape.rank
    shape[layer.axis] = -1
    normal = (x - mean) * tf.math.rsqrt(variance + layer.epsilon)
    if layer.scale:
        normal *= tf.reshape(tf.cast(layer.gamma, dtype), shape)
    if layer.center:
        normal += tf.reshape(tf.cast(layer.beta, dtype), shape)
    return tf.cast(normal, layer.compute_dtype)
