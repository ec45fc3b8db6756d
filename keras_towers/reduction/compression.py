"""Hooks that send gradients in 16 bits, and links of chains for them.

=================  ============================================================
``all_reduce``          no compression
``fp16``           the engine sums in float16: right for NCCL; slower than no
                   compression over Gloo, which adds float16 in software
``fp16_shards``    sends float16; each rank sums one shard in float32
``bf16_shards``    the same with bfloat16: the range of float32, 8 bits of
                   precision; engines cannot sum bfloat16 themselves
=================  ============================================================

With shards, an all-to-all followed by sums is the reduce-scatter, and an
all-gather follows; sums are rounded again before they are sent back. Two ranks
send as much, in one exchange, if each sends all its values and sums both. A
value too large for float16 becomes infinity, which ``LossScaleOptimizer``
detects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.reduction.ranks import (
    CommunicationHook,
    Decode,
    Link,
    all_reduce,
    chain,
    sum_apart,
)
from keras_towers.transport import Transport
from keras_towers.transport.messages import packed

_BUCKET_BYTES = 16 * 2**20


def rounded(dtype: tf.DType) -> Link:
    """Sum in a dtype of 16 bits."""

    def link(
        tensors: Sequence[tf.Tensor], key: str
    ) -> tuple[list[tf.Tensor], Decode]:
        _check_floats(tensors)
        sent = [
            tf.cast(t, dtype) if _is_rounded(t, dtype) else t for t in tensors
        ]

        def decode(sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return [
                tf.cast(s, t.dtype) for s, t in zip(sums, tensors, strict=True)
            ]

        return sent, decode

    return link


fp16: CommunicationHook = chain(rounded(tf.float16), all_reduce)
"""Sum in float16, by the transport's all-reduce."""


def _is_rounded(tensor: tf.Tensor, dtype: tf.DType) -> bool:
    """Whether sending a gradient as ``dtype`` loses precision."""
    return tensor.dtype.is_floating and tensor.dtype.size > dtype.size


def _shards(dtype: tf.DType) -> CommunicationHook:
    """Send a dtype of 16 bits; each rank sums its shard in float32."""

    def hook(
        transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        def by_shards(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            known = all(t.shape.is_fully_defined() for t in tensors)
            if transport.size == 2 and known:
                return _sum_two(dtype, transport, tensors, key)
            return packed(
                tensors,
                lambda vectors: [
                    _sum_shards(dtype, transport, vector, f"{key}.{n}")
                    for n, vector in enumerate(vectors)
                ],
                _BUCKET_BYTES,
            )

        _check_floats(tensors)
        return sum_apart(
            transport, tensors, key, lambda t: _is_rounded(t, dtype), by_shards
        )

    return hook


fp16_shards: CommunicationHook = _shards(tf.float16)
"""Send float16; each rank sums its shard in float32."""

bf16_shards: CommunicationHook = _shards(tf.bfloat16)
"""Send bfloat16; each rank sums its shard in float32."""


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
    lost: dict[tuple, tf.Variable] = {}

    def corrected(
        tensor: tf.Tensor, key: str, index: int
    ) -> tuple[tf.Tensor, tf.Operation | None]:
        if not (_is_rounded(tensor, dtype) and tensor.shape.is_fully_defined()):
            return tensor, None
        # Gradients of another model may use the same key.
        name = (key, index, tuple(tensor.shape), tensor.dtype)
        if name not in lost:
            with tf.init_scope(), compat.single_device_mode():
                zeros = tf.zeros(tensor.shape, tensor.dtype)
                lost[name] = tf.Variable(zeros, trainable=False)
        wanted = tensor + lost[name]
        error = wanted - tf.cast(tf.cast(wanted, dtype), tensor.dtype)
        kept = tf.where(tf.math.is_finite(error), error, 0)
        return wanted, lost[name].assign(kept, read_value=False)

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


def _sum_shards(
    dtype: tf.DType, transport: Transport, tensor: tf.Tensor, key: str
) -> tf.Tensor:
    flat = tf.reshape(tensor, [-1])
    elements = tf.size(flat)
    padded = tf.pad(flat, [[0, -elements % transport.size]])
    mine = transport.all_to_all(tf.cast(padded, dtype), f"{key}.parts")
    rows = tf.unstack(
        tf.reshape(mine, [transport.size, -1]), num=transport.size
    )
    total = tf.add_n([tf.cast(row, tf.float32) for row in rows])
    totals = transport.all_gather(tf.cast(total, dtype), f"{key}.sums")
    totals = tf.cast(totals[:elements], tensor.dtype)
    return tf.ensure_shape(tf.reshape(totals, tf.shape(tensor)), tensor.shape)


def _sum_two(
    dtype: tf.DType,
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    key: str,
) -> list[tf.Tensor]:
    """Sum the tensors of two ranks, which send each other all values."""
    # Not as an all-to-all or a gather: where two ranks are both neighbours of
    # each other, Gloo sends in one direction of the link after the other. A sum
    # of integers, which may wrap around, less a rank's own is the other's.
    sent = [tf.cast(t, dtype) for t in tensors]
    mine = [_words(t) for t in sent]
    both = transport.all_reduce(mine, f"{key}.both")
    totals = []
    for own, words, total, tensor in zip(
        sent, mine, both, tensors, strict=True
    ):
        flat = tf.reshape(tf.bitcast(total - words, dtype), [-1])
        other = tf.reshape(flat[: tf.size(own)], tf.shape(own))
        rows = [own, other] if transport.rank == 0 else [other, own]
        value = tf.add_n([tf.cast(row, tf.float32) for row in rows])
        totals.append(tf.cast(tf.cast(value, dtype), tensor.dtype))
    return totals


def _words(tensor: tf.Tensor) -> tf.Tensor:
    """Return values of 16 bits as a vector of integers of 32."""
    flat = tf.reshape(tensor, [-1])
    padded = tf.pad(flat, [[0, tf.size(flat) % 2]])
    return tf.bitcast(tf.reshape(padded, [-1, 2]), tf.int32)


def _check_floats(tensors: Sequence[tf.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if not tensor.dtype.is_floating:
            raise TowerError(
                f"compression on integer gradients: gradient {index} is "
                f"{tensor.dtype.name}, which does not fit 16-bit floats. Use "
                "compression=None."
            )


CompressionName: TypeAlias = Literal[
    "none", "fp16", "fp16-shards", "bf16", "fp16-feedback", "bf16-feedback"
]
"""How gradients are exchanged between processes."""

_NAMED: dict[str, Callable[[], CommunicationHook]] = {
    "none": lambda: all_reduce,
    "fp16": lambda: fp16,
    "fp16-shards": lambda: fp16_shards,
    "bf16": lambda: bf16_shards,
    "fp16-feedback": lambda: chain(error_feedback(tf.float16), fp16_shards),
    "bf16-feedback": lambda: chain(error_feedback(tf.bfloat16), bf16_shards),
}


def resolve(
    compression: CompressionName | CommunicationHook | None,
) -> CommunicationHook:
    """Return the hook for a user's choice; None: ``all_reduce``.

    Example:
        >>> resolve("bf16") is bf16_shards
        True
    """
    if callable(compression):
        return compression
    return _NAMED[compression or "none"]()
