"""What a step may say of the towers that it is laid out over."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from keras_towers import compat

# The graphs of the functions that are called here: nobody else calls them.
_MEANS: weakref.WeakSet[Any] = weakref.WeakSet()


@tf.custom_gradient
def own_mean(x: tf.Tensor) -> Any:
    """Return for each row the mean of all that the same tower has.

    On one device it is the mean of all rows. It is its own gradient, as the
    operator is linear and self-adjoint.

    Args:
        x: the rows, along the first axis.
    """
    return _mean_of_rows(x), own_mean


@tf.function(autograph=False)
def _mean_of_rows(x: tf.Tensor) -> tf.Tensor:
    _MEANS.add(compat.get_default_graph())
    return tf.broadcast_to(tf.reduce_mean(x, 0, keepdims=True), tf.shape(x))


def is_own_mean(graph: Any) -> bool:
    """Whether a function that an operation calls is that of own means."""
    return graph in _MEANS
