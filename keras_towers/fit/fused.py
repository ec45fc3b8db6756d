"""Updates of SGD by one operation a weight.

Keras computes them by five, each of which goes through the whole weight: a
tenth of a step with 8.4 million parameters on two towers. TensorFlow has the
same formula in one operation. It has Adam's too, but computes ``1 - beta_2``
in single precision, whose fifth digit is already another: not the weights of
one device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat

_local = threading.local()


@contextlib.contextmanager
def updates() -> Iterator[None]:
    """Let the optimizers of this thread fuse what they can, in the block."""
    before = getattr(_local, "active", False)
    _local.active = True
    try:
        yield
    finally:
        _local.active = before


def update_step(
    original: Callable,
    optimizer: keras.optimizers.SGD,
    gradient: Any,
    variable: Any,
    learning_rate: Any,
) -> None:
    """``SGD.update_step`` by one operation, for dense gradients.

    Args:
        original: the class's own.
        optimizer: the optimizer it was called on.
        gradient: of the weight.
        variable: the weight.
        learning_rate: a number or tensor.
    """
    if not getattr(_local, "active", False) or not _is_plain(
        variable, gradient
    ):
        original(optimizer, gradient, variable, learning_rate)
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
