"""Exchanges that send gradients in 16 bits.

=================  ============================================================
``exact``          no compression
``fp16``           the engine sums in float16: right for NCCL; slower than no
                   compression over Gloo, which adds float16 in software
``fp16_shards``    sends float16; each rank sums one shard in float32
``bf16_shards``    the same with bfloat16: the range of float32, 8 bits of
                   precision; engines cannot sum bfloat16 themselves
=================  ============================================================

With shards, an all-to-all followed by sums is the reduce-scatter, and an
all-gather follows; sums are rounded again before they are sent back. A value
too large for float16 becomes infinity, which ``LossScaleOptimizer`` detects.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, TypeAlias

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction.error_feedback import with_error_feedback
from keras_towers.reduction.exchange import Exchange, exact, in_buckets
from keras_towers.transport import Transport


def fp16(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Sum in float16, by the transport's all-reduce."""
    _check_floats(tensors)
    sums = transport.all_reduce(
        [
            tf.cast(t, tf.float16) if is_rounded(t, tf.float16) else t
            for t in tensors
        ],
        key,
    )
    return [tf.cast(s, t.dtype) for s, t in zip(sums, tensors, strict=True)]


def fp16_shards(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Send float16; each rank sums its shard in float32."""
    return _by_shards(tf.float16, transport, tensors, key)


def bf16_shards(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Send bfloat16; each rank sums its shard in float32."""
    return _by_shards(tf.bfloat16, transport, tensors, key)


def is_rounded(tensor: tf.Tensor, dtype: tf.DType) -> bool:
    """Whether a gradient is sent as ``dtype`` with a loss of precision.

    Those that already have 16 bits are sent unchanged.
    """
    return tensor.dtype.is_floating and tensor.dtype.size > dtype.size


def _by_shards(
    dtype: tf.DType,
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    key: str,
) -> list[tf.Tensor]:
    _check_floats(tensors)
    # An engine may reject empty messages.
    full = [i for i, t in enumerate(tensors) if t.shape.num_elements() != 0]
    rounded = [i for i in full if is_rounded(tensors[i], dtype)]
    return in_buckets(
        functools.partial(_sum_bucket, dtype),
        transport,
        tensors,
        key,
        chosen=rounded,
        others=[i for i in full if i not in set(rounded)],
    )


def _sum_bucket(
    dtype: tf.DType,
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    key: str,
) -> list[tf.Tensor]:
    flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)
    elements = tf.size(flat)
    padded = tf.pad(flat, [[0, -elements % transport.size]])
    mine = transport.all_to_all(tf.cast(padded, dtype), f"{key}.parts")
    rows = tf.unstack(
        tf.reshape(mine, [transport.size, -1]), num=transport.size
    )
    total = tf.add_n([tf.cast(row, tf.float32) for row in rows])
    totals = transport.all_gather(tf.cast(total, dtype), f"{key}.sums")
    totals = tf.cast(totals[:elements], tensors[0].dtype)
    sizes = [
        tf.size(t) if (n := t.shape.num_elements()) is None else n
        for t in tensors
    ]
    return [
        tf.ensure_shape(tf.reshape(part, tf.shape(t)), t.shape)
        for part, t in zip(tf.split(totals, sizes), tensors, strict=True)
    ]


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

_NAMED: dict[str, Exchange] = {
    "none": exact,
    "fp16": fp16,
    "fp16-shards": fp16_shards,
    "bf16": bf16_shards,
}
_WITH_FEEDBACK = {
    "fp16-feedback": (fp16_shards, tf.float16),
    "bf16-feedback": (bf16_shards, tf.bfloat16),
}


def resolve(compression: CompressionName | Exchange | None) -> Exchange:
    """Return the exchange for a user's choice.

    Args:
        compression: None or ``"none"``, ``"fp16"``, ``"fp16-shards"``,
            ``"bf16"`` (by shards), ``"fp16-feedback"`` or ``"bf16-feedback"``
            (by shards, with error feedback), or a function.

    Raises:
        TowerError: unknown name.

    Example:
        >>> resolve("bf16") is bf16_shards
        True
    """
    if compression is None:
        return exact
    if callable(compression):
        return compression
    if isinstance(compression, str):
        if compression in _WITH_FEEDBACK:
            return with_error_feedback(*_WITH_FEEDBACK[compression])
        if compression in _NAMED:
            return _NAMED[compression]
    names = ", ".join(map(repr, [*_NAMED, *_WITH_FEEDBACK]))
    raise TowerError(
        f"compression={compression!r} is unknown: give None, one of {names}, "
        "or a function of a transport, tensors and a key."
    )
