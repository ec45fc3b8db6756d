"""Messages between ranks: tensors in dtypes that engines know, few at a time.

An engine knows few dtypes, and each message costs. So bits travel in a dtype of
equal size, sums in a wider one, and small tensors of a dtype together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError

# Bits are carried in a dtype of equal size.
_SENT_AS = {
    tf.bfloat16: tf.float16,
    tf.int16: tf.float16,
    tf.uint16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
}
# There is none of one byte: these become numbers.
_WIDENED = (tf.bool, tf.int8, tf.uint8)
CARRIED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_SUMMED_AS = {
    tf.bfloat16: tf.float32,
    **dict.fromkeys((*_WIDENED, tf.int16, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}

_BYTES = [bytes([number]) for number in range(256)]

MESSAGE_BYTES: int = 4 * 2**20


def carried(
    tensor: tf.Tensor, native: Collection[tf.DType] | None = CARRIED
) -> tf.Tensor:
    """Convert a tensor to a dtype that an engine can send; None: any."""
    if native is None or tensor.dtype in native:
        return tensor
    if tensor.dtype in _WIDENED:
        return tf.cast(tensor, tf.int32)
    if tensor.dtype not in _SENT_AS:
        raise TowerError(
            f"tensors of dtype {tensor.dtype.name} cannot be sent to other "
            "ranks: send numbers or truth values of at most 64 bits."
        )
    return tf.bitcast(tensor, _SENT_AS[tensor.dtype])


def received(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undo ``carried``: convert a tensor back to its dtype."""
    if dtype in _WIDENED:
        return tf.cast(tensor, dtype)
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)


def gathered(
    all_gather: Callable[[tf.Tensor, str], tf.Tensor],
    tensor: tf.Tensor,
    key: str,
) -> tf.Tensor:
    """Join the ranks' tensors of any dtype along the first axis."""
    if tensor.dtype != tf.string:
        return all_gather(tensor, key)
    # Texts travel as their bytes, with their lengths.
    lengths = all_gather(tf.strings.length(tensor), f"{key}.lengths")
    whole = tf.strings.reduce_join(tf.reshape(tensor, [-1]))
    numbers = all_gather(tf.io.decode_raw(whole, tf.uint8), f"{key}.bytes")
    characters = tf.gather(_BYTES, tf.cast(numbers, tf.int32))
    ragged: Any = tf.RaggedTensor
    every = ragged.from_row_lengths(
        characters, tf.reshape(lengths, [-1]), validate=False
    )
    texts = tf.strings.reduce_join(every, axis=-1)
    return tf.ensure_shape(
        tf.reshape(texts, tf.shape(lengths)), [None, *tensor.shape[1:]]
    )


def summable(tensor: tf.Tensor) -> tf.Tensor:
    """Convert a tensor to a dtype that engines can sum."""
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    return tf.cast(tensor, _SUMMED_AS.get(tensor.dtype, tensor.dtype))


def summed(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undo ``summable``: convert a sum back to the dtype of the tensor."""
    if dtype.is_complex:
        return tf.complex(*tf.unstack(tensor, axis=-1))
    return tf.cast(tensor, dtype)


def packed(
    tensors: Sequence[tf.Tensor],
    send: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
    limit: int = MESSAGE_BYTES,
) -> list[tf.Tensor]:
    """Send N tensors; small ones of a dtype together, empty ones not at all.

    Args:
        send: sends M tensors, and returns M of their shapes.
        limit: bytes of the largest message of several tensors.
    """
    groups = packs(tensors, limit)
    if not groups:
        return list(tensors)
    return unpack(send(pack(tensors, groups)), groups, tensors)


def pack(
    tensors: Sequence[tf.Tensor], groups: Sequence[Sequence[int]]
) -> list[tf.Tensor]:
    """Concatenate the tensors of each group; one alone stays as it is."""
    return [
        tf.concat([tf.reshape(tensors[i], [-1]) for i in group], 0)
        if len(group) > 1
        else tensors[group[0]]
        for group in groups
    ]


def unpack(
    packed: Sequence[tf.Tensor],
    groups: Sequence[Sequence[int]],
    tensors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Undo ``pack``; tensors in no group are returned as they are."""
    results = list(tensors)
    for group, whole in zip(groups, packed, strict=True):
        if len(group) == 1:
            results[group[0]] = whole
            continue
        sizes = [tensors[i].shape.num_elements() for i in group]
        for i, part in zip(group, tf.split(whole, sizes), strict=True):
            results[i] = tf.reshape(part, tensors[i].shape)
    return results


def packs(
    tensors: Sequence[tf.Tensor], limit: int = MESSAGE_BYTES
) -> list[list[int]]:
    """Group the non-empty tensors by message.

    The backward pass computes the last gradient first, so the groups go from
    last to first: one is sent while the next is computed.
    """
    groups: list[list[int]] = []
    still_open: dict[tf.DType, tuple[list[int], int]] = {}
    for i in reversed(range(len(tensors))):
        elements = tensors[i].shape.num_elements()
        if elements == 0:
            continue
        size = (elements or 0) * tensors[i].dtype.size
        if elements is None or size >= limit:
            groups.append([i])
            continue
        members, filled = still_open.get(tensors[i].dtype, ([], 0))
        if not members or filled + size > limit:
            members, filled = [], 0
            groups.append(members)
        members.append(i)
        still_open[tensors[i].dtype] = members, filled + size
    return groups
