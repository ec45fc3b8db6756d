"""Updates of SGD by one operation a weight.

Keras computes them by five, each of which goes through the whole weight: a
tenth of a step with 8.4 million parameters on two towers. TensorFlow has the
same formula in one operation. It has Adam's too, but computes ``1 - beta_2``
in single precision, whose fifth digit is already another: not the weights of
one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat


def applies_to(optimizer: Any) -> bool:
    """Whether an optimizer's update is the one of Keras's SGD."""
    return type(optimizer).update_step is keras.optimizers.SGD.update_step


def update_step(
    optimizer: keras.optimizers.SGD,
    original: Callable[..., None],
    gradient: Any,
    variable: Any,
    learning_rate: Any,
) -> None:
    """``SGD.update_step`` by one operation, for dense gradients.

    Args:
        optimizer: the optimizer it was called on.
        original: its own.
        gradient: of the weight.
        variable: the weight.
        learning_rate: a number or tensor.
    """
    if not _is_plain(variable, gradient):
        original(gradient, variable, learning_rate)
        return
    # Locked, because asynchronous towers may write the same weight.
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
