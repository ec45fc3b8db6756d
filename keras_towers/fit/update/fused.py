"""SGD updates with one fused operation per weight.

Keras uses five operations, each of which makes a pass over the whole weight.
TensorFlow's fused kernel computes the same formula in one pass. Its Adam
kernel is not used: it computes ``1 - beta_2`` in single precision, so weights
would differ from those of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat


def applies_to(optimizer: Any) -> bool:
    """Whether an optimizer uses the update rule of Keras's SGD."""
    return type(optimizer).update_step is keras.optimizers.SGD.update_step


def update_step(
    optimizer: keras.optimizers.SGD,
    original: Callable[..., None],
    gradient: Any,
    variable: Any,
    learning_rate: Any,
) -> None:
    """``SGD.update_step`` as one operation, for dense gradients.

    Args:
        optimizer: the optimizer it is called on.
        original: its own ``update_step``.
        gradient: the gradient of the weight.
        variable: the weight.
        learning_rate: a number or scalar tensor.
    """
    if not _is_plain(variable, gradient):
        original(gradient, variable, learning_rate)
        return
    # Asynchronous towers may write the same weight concurrently.
    where = {"var": variable.handle, "use_locking": True}
    gradient = tf.cast(gradient, variable.dtype)
    learning_rate = tf.cast(learning_rate, variable.dtype)
    if optimizer.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(
            alpha=learning_rate, delta=gradient, **where
        )
        return
    index = optimizer._get_variable_index(variable)
    tf.raw_ops.ResourceApplyKerasMomentum(
        accum=optimizer.momentums[index]._value.handle,
        lr=learning_rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, variable.dtype),
        use_nesterov=optimizer.nesterov,
        **where,
    )


def _is_plain(variable: Any, gradient: Any) -> bool:
    return (
        not isinstance(gradient, tf.IndexedSlices)
        and isinstance(variable, tf.Variable)
        and not isinstance(variable, compat.DistributedVariable)
        and variable.dtype in (tf.float32, tf.float64)
    )
