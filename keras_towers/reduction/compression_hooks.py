"""Compression of gradients for sums over processes: communication hooks.

=================  ============================================================
``all_reduce``     no compression
``fp16``           sends float16; engines that sum it in hardware, such as
                   NCCL, sum it; otherwise the same as ``fp16_shards``
``fp16_shards``    sends float16; each rank sums one shard in float32
``bf16_shards``    the same with bfloat16: the range of float32, 8 bits of
                   precision; engines cannot sum bfloat16 themselves
``ErrorFeedback``  adds each gradient's rounding error to the next one
``PowerSGD``       sends two thin factors of each matrix (Vogels et al.,
                   "PowerSGD: Practical Low-Rank Gradient Compression for
                   Distributed Optimization", 2019), with error feedback
=================  ============================================================

The last two have a state (``stateful_hooks.py``). ``rank_sum.py`` calls hooks,
and checks what they return.

With shards, an all-to-all and local sums make a reduce-scatter. Ranks then
round the sums again, and gather them. Two ranks instead exchange all values at
once, which sends the same amount, and both sum them. A value too large for
float16 becomes infinity, which ``LossScaleOptimizer`` detects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_towers.reduction.gradients import check_floats
from keras_towers.transport import Transport, messages

CommunicationHook: TypeAlias = Callable[
    [Transport, Sequence[tf.Tensor], str], list[tf.Tensor]
]
"""Returns the N sums over the ranks of this rank's N dense tensors.

The string is a prefix for the keys of the collectives, the same on all ranks.
The sums are bit-identical on every rank.
"""


def all_reduce(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Sum tensors losslessly, by the transport's all-reduce."""
    return transport.all_reduce(tensors, key)


def sum_separately(
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    key: str,
    is_separate: Callable[[tf.Tensor], bool],
    sum_chosen: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
) -> list[tf.Tensor]:
    """Sum some tensors by a given function, and the rest by an all-reduce."""
    sums = list(tensors)
    # An engine may reject empty messages.
    full = [i for i, t in enumerate(tensors) if t.shape.num_elements() != 0]
    chosen = [i for i in full if is_separate(tensors[i])]
    others = [i for i in full if i not in set(chosen)]
    totals = [*sum_chosen([tensors[i] for i in chosen])] if chosen else []
    if others:
        rest = [tensors[i] for i in others]
        totals += transport.all_reduce(rest, f"{key}.rest")
    for i, total in zip([*chosen, *others], totals, strict=True):
        sums[i] = total
    return sums


# A message takes two rounds: with 4 MiB, as in an all-reduce, four ranks took
# 1.2 to 1.4 times as long.
_BUCKET_BYTES = 16 * 2**20


def is_rounded(tensor: tf.Tensor | tf.TensorSpec, dtype: tf.DType) -> bool:
    """Whether sending a gradient as ``dtype`` loses precision."""
    return tensor.dtype.is_floating and tensor.dtype.size > dtype.size


def _sum_in_shards(
    dtype: tf.DType,
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    key: str,
) -> list[tf.Tensor]:
    """Send a 16-bit dtype; each rank sums its shard in float32."""

    def exchange(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        known = all(t.shape.is_fully_defined() for t in tensors)
        if transport.size == 2 and known:
            return _sum_two(dtype, transport, tensors, key)
        return messages.send_packed(
            tensors,
            lambda vectors: [
                _sum_shards(dtype, transport, vector, f"{key}.{n}")
                for n, vector in enumerate(vectors)
            ],
            _BUCKET_BYTES,
        )

    check_floats(tensors)
    return sum_separately(
        transport, tensors, key, lambda t: is_rounded(t, dtype), exchange
    )


def fp16_shards(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Send float16; each rank sums its shard in float32."""
    return _sum_in_shards(tf.float16, transport, tensors, key)


def bf16_shards(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Send bfloat16; each rank sums its shard in float32."""
    return _sum_in_shards(tf.bfloat16, transport, tensors, key)


def fp16(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Send float16; engines that sum it at full speed do so."""
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

    An all-to-all or a gather would be slower: in a ring of two ranks, Gloo uses
    one direction of the link at a time. So the bits are summed as integers,
    which may wrap around, and each rank subtracts its own to get the other
    rank's.
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
