"""Hooks that send gradients in 16 bits, and the names of all hooks.

=================  ============================================================
``all_reduce``     no compression
``fp16``           sends float16; the engine sums it, if it does so in hardware,
                   as NCCL does; otherwise as ``fp16_shards``
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

from keras_towers.reduction.communication_hooks import (
    CommunicationHook,
    all_reduce,
    sum_separately,
)
from keras_towers.reduction.feedback import (
    error_feedback,
    is_rounded,
    power_sgd,
)
from keras_towers.reduction.gradients import check_floats
from keras_towers.transport import Transport, messages

_BUCKET_BYTES = 16 * 2**20


def _shards(dtype: tf.DType) -> CommunicationHook:
    """Send a 16-bit dtype; each rank sums its shard in float32."""

    def hook(
        transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        def by_shards(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            known = all(t.shape.is_fully_defined() for t in tensors)
            if transport.size == 2 and known:
                return _sum_two(dtype, transport, tensors, key)
            return messages.packed(
                tensors,
                lambda vectors: [
                    _sum_shards(dtype, transport, vector, f"{key}.{n}")
                    for n, vector in enumerate(vectors)
                ],
                _BUCKET_BYTES,
            )

        check_floats(tensors)
        return sum_separately(
            transport, tensors, key, lambda t: is_rounded(t, dtype), by_shards
        )

    return hook


fp16_shards: CommunicationHook = _shards(tf.float16)
"""Send float16; each rank sums its shard in float32."""

bf16_shards: CommunicationHook = _shards(tf.bfloat16)
"""Send bfloat16; each rank sums its shard in float32."""


def fp16(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Send float16; engines that sum it as fast as they send it do so."""
    if not transport.sums_float16:
        return fp16_shards(transport, tensors, key)
    check_floats(tensors)
    sent = [
        tf.cast(t, tf.float16) if is_rounded(t, tf.float16) else t
        for t in tensors
    ]
    sums = transport.all_reduce(sent, key)
    return [tf.cast(s, t.dtype) for s, t in zip(sums, tensors, strict=True)]


def _sum_shards(
    dtype: tf.DType, transport: Transport, tensor: tf.Tensor, key: str
) -> tf.Tensor:
    flat = tf.reshape(tensor, [-1])
    elements = tf.size(flat)
    padded = tf.pad(flat, [[0, -elements % transport.size]])
    shards = transport.all_to_all(tf.cast(padded, dtype), f"{key}.parts")
    rows = tf.unstack(
        tf.reshape(shards, [transport.size, -1]), num=transport.size
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
    """Sum the tensors of two ranks, which exchange all values.

    Not as an all-to-all or a gather: where two ranks are both neighbours of
    each other, Gloo sends in one direction of the link after the other. A sum
    of integers, which may wrap around, less a rank's own is the other's.
    """
    sent = [tf.cast(t, dtype) for t in tensors]
    words = [messages.words_of(t) for t in sent]
    sums = transport.all_reduce(words, f"{key}.both")
    totals = []
    for own, mine, both, tensor in zip(sent, words, sums, tensors, strict=True):
        other = messages.from_words(both - mine, dtype, tf.shape(own))
        total = tf.cast(own, tf.float32) + tf.cast(other, tf.float32)
        totals.append(tf.cast(tf.cast(total, dtype), tensor.dtype))
    return totals


CompressionName: TypeAlias = Literal[
    "none",
    "fp16",
    "fp16-shards",
    "bf16",
    "fp16-feedback",
    "bf16-feedback",
    "power-sgd",
]
"""How gradients are exchanged between processes."""


_FEEDBACK = "; what a rank's rounding loses is added to its next gradient"
_NAMED: dict[str, tuple[Callable[[], CommunicationHook], str]] = {
    "none": (lambda: all_reduce, ""),
    "fp16": (
        lambda: fp16,
        "sent in float16, and summed in it over NCCL and BytePS",
    ),
    "fp16-shards": (lambda: fp16_shards, "sent in float16"),
    "bf16": (lambda: bf16_shards, "sent in bfloat16"),
    "fp16-feedback": (
        lambda: error_feedback(fp16_shards, tf.float16),
        f"sent in float16{_FEEDBACK}",
    ),
    "bf16-feedback": (
        lambda: error_feedback(bf16_shards, tf.bfloat16),
        f"sent in bfloat16{_FEEDBACK}",
    ),
    "power-sgd": (
        power_sgd,
        "sent as two factors of low rank where they are matrices; what a rank "
        "loses is added to its next gradient",
    ),
}


def resolve(
    compression: CompressionName | CommunicationHook | None,
) -> CommunicationHook:
    """Return the hook for a user's choice; None: ``all_reduce``."""
    if callable(compression):
        return compression
    make, _ = _NAMED[compression or "none"]
    return make()


def describe_effect(
    compression: CompressionName | CommunicationHook | None,
) -> str:
    """Describe how gradients are exchanged, if that may change results."""
    if callable(compression):
        kind = type(compression).__qualname__
        name = getattr(compression, "__qualname__", kind).split(".<locals>")[0]
        return f"gradients are exchanged by {name}, which may change results"
    _, how = _NAMED[compression or "none"]
    if not how:
        return ""
    return f'compression "{compression}" changes results: gradients are {how}'
