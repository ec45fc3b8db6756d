"""Error feedback: a gradient's rounding error is added to the next one.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs", 2014; Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_towers import compat
from keras_towers.reduction.exchange import Exchange
from keras_towers.transport import Transport


def with_error_feedback(exchange: Exchange, dtype: tf.DType) -> Exchange:
    """Let a lossy exchange compensate for its rounding errors.

    Each rank stores its own rounding errors, which takes as much memory as its
    gradients. The rounding of the sums that are sent back is not compensated.
    For values that are not finite, no error is stored.

    Args:
        exchange: rounds gradients with more bits to ``dtype``.
        dtype: what it rounds to.

    Returns:
        A stateful exchange; use it for one strategy only.

    Example:
        >>> exchange = with_error_feedback(bf16_shards, tf.bfloat16)
    """
    lost: dict[tuple, tf.Variable] = {}

    def memory(key: str, index: int, tensor: tf.Tensor) -> tf.Variable:
        # The shape is part of the name because gradients of another model may
        # use the same key.
        name = (key, index, tuple(tensor.shape), tensor.dtype)
        if name not in lost:
            lost[name] = _zeros_like(tensor)
        return lost[name]

    def corrected(
        tensor: tf.Tensor, key: str, index: int
    ) -> tuple[tf.Tensor, tf.Operation | None]:
        lossy = tensor.dtype.is_floating and tensor.dtype.size > dtype.size
        if not lossy or not tensor.shape.is_fully_defined():
            return tensor, None
        variable = memory(key, index, tensor)
        wanted = tensor + variable
        error = wanted - tf.cast(tf.cast(wanted, dtype), tensor.dtype)
        kept = tf.where(tf.math.is_finite(error), error, 0)
        return wanted, variable.assign(kept, read_value=False)

    def exchange_with_feedback(
        transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        pairs = [corrected(t, key, i) for i, t in enumerate(tensors)]
        sums = exchange(transport, [tensor for tensor, _ in pairs], key)
        # Nothing else in the graph depends on the assignments.
        with tf.control_dependencies(
            [kept for _, kept in pairs if kept is not None]
        ):
            return [tf.identity(total) for total in sums]

    return exchange_with_feedback


def _zeros_like(tensor: tf.Tensor) -> tf.Variable:
    with tf.init_scope(), compat.single_device_mode():
        return tf.Variable(
            tf.zeros(tensor.shape, tensor.dtype), trainable=False
        )
