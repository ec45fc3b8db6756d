"""BatchNormalization with the statistics of each tower's rows.

For ``batch_norm="tower"``: it needs no exchange, but changes results. A layer
normalizes each example with the statistics of its tower's rows; the moving
statistics are updated with the means of these over all examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.context import thread_state
from keras_towers.foundation import compat
from keras_towers.partition.layout.rules.control_flow import own_mean


def normalize(
    original: Callable[..., tf.Tensor],
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """Do what ``BatchNormalization.call`` does, in place of it.

    Args:
        original: Keras's method, for all other options and steps.
        layer: the layer.
        inputs: what it normalizes.
        training: as Keras says.
        mask: as Keras says.
    """
    step = thread_state.current_step()
    of_each_tower = step is not None and step.training and step.own_statistics
    trains = training and layer.trainable
    rows_are_first = inputs.shape.rank and layer.axis % inputs.shape.rank
    is_usual = mask is None and not compat.uses_renorm(layer)
    if not (of_each_tower and trains and rows_are_first and is_usual):
        return original(layer, inputs, training=training, mask=mask)
    dtype = keras.backend.result_type(inputs.dtype, "float32")
    x = tf.cast(inputs, dtype)
    axes = [axis for axis in layer._reduction_axes if axis != 0]

    def moment(values: tf.Tensor) -> tf.Tensor:
        if axes:
            values = tf.reduce_mean(values, axes, keepdims=True)
        mean: Any = own_mean(values)
        return mean

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
