"""Error feedback: what is lost of a gradient is added to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.reduction.ranks import Decode, Link


def is_rounded(tensor: tf.Tensor, dtype: tf.DType) -> bool:
    """Whether sending a gradient as ``dtype`` loses precision."""
    return tensor.dtype.is_floating and tensor.dtype.size > dtype.size


class Memory:
    """Variables in which a link or a hook keeps values between steps."""

    def __init__(self) -> None:
        self._variables: dict[tuple[Any, ...], tf.Variable] = {}

    def variable(
        self,
        name: tuple[Any, ...],
        initial: Callable[[tf.TensorShape, tf.DType], tf.Tensor],
        shape: tf.TensorShape,
    ) -> tf.Variable:
        """Return the variable of a gradient."""
        # Gradients of another model may use the same key, so a name has index,
        # shape and dtype, too.
        if name not in self._variables:
            with tf.init_scope(), compat.single_device_mode():
                value = initial(shape, name[3])
                self._variables[name] = tf.Variable(value, trainable=False)
        return self._variables[name]


def error_feedback(dtype: tf.DType) -> Link:
    """Add the rounding error of each gradient to the next one.

    Each rank stores its own rounding errors, which takes as much memory as its
    gradients. The rounding of the sums that are sent back is not compensated.
    For values that are not finite, no error is stored.

    Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", 2014; Karimireddy et
    al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    2019.

    Args:
        dtype: what the rest of the chain rounds gradients with more bits to.

    Returns:
        A stateful link; use it for one strategy only.
    """
    memory = Memory()

    def corrected(
        tensor: tf.Tensor, key: str, index: int
    ) -> tuple[tf.Tensor, tf.Operation | None]:
        if not (is_rounded(tensor, dtype) and tensor.shape.is_fully_defined()):
            return tensor, None
        name = (key, index, tuple(tensor.shape), tensor.dtype)
        lost = memory.variable(name, tf.zeros, tensor.shape)
        wanted = tensor + lost
        error = wanted - tf.cast(tf.cast(wanted, dtype), tensor.dtype)
        kept = tf.where(tf.math.is_finite(error), error, 0)
        return wanted, lost.assign(kept, read_value=False)

    def link(
        tensors: Sequence[tf.Tensor], key: str
    ) -> tuple[list[tf.Tensor], Decode]:
        pairs = [corrected(t, key, i) for i, t in enumerate(tensors)]
        stored = [kept for _, kept in pairs if kept is not None]

        def decode(sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            # Nothing else in the graph depends on the assignments.
            with tf.control_dependencies(stored):
                return [tf.identity(total) for total in sums]

        return [tensor for tensor, _ in pairs], decode

    return link
