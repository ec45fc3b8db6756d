"""Values whose gradients are scaled."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def with_gradient_times(factor: Any, values: Any) -> Any:
    """Return the values; their gradient is multiplied by a factor."""

    @tf.custom_gradient
    def identity(value):
        return tf.identity(
            value
        ), lambda grad: grad * tf.cast(factor, grad.dtype)

    return tf.nest.map_structure(
        lambda value: (
            identity(value)
            if isinstance(value, tf.Tensor) and is_differentiable(value)
            else value
        ),
        values,
    )


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether a tensor's dtype can have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex
