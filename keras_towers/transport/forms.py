"""Tensors in the forms that TensorFlow's collective operations take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.transport.instances import FIRST_OF_ROOMS, ROOMS

# The operations support few dtypes. Bits are carried in one of equal size.
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
_CARRIED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_SUMMED_AS = {
    tf.bfloat16: tf.float32,
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}

# Messages of less cost more than what they carry.
_PACK_BYTES = 4 * 2**20


def carried(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor as a dtype that TensorFlow sends."""
    if tensor.dtype in _WIDENED:
        return tf.cast(tensor, tf.int32)
    known = _SENT_AS.get(tensor.dtype)
    if known is not None:
        return tf.bitcast(tensor, known)
    if tensor.dtype not in _CARRIED:
        raise TowerError(
            f"tensors of dtype {tensor.dtype.name} cannot be sent to other "
            "ranks: send numbers or truth values of at most 64 bits."
        )
    return tensor


def received(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return what was ``carried`` as the dtype that it had."""
    if dtype in _WIDENED:
        return tf.cast(tensor, dtype)
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)


def summable(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor as a dtype in which TensorFlow sums."""
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    return tf.cast(tensor, _SUMMED_AS.get(tensor.dtype, tensor.dtype))


def summed(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the sum of what was ``summable`` as the dtype that it had."""
    if dtype.is_complex:
        return tf.complex(*tf.unstack(tensor, axis=-1))
    return tf.cast(tensor, dtype)


def known(tensor: tf.Tensor, key: str) -> str:
    """Return a tensor's dtype and shape, which are part of its key."""
    if tensor.shape.num_elements() is None:
        raise TowerError(
            f"the collective {key!r} got a tensor of shape {tensor.shape}: "
            "every dimension has to be known when the function is traced. Give "
            "it with tf.ensure_shape or as the `shape` of a tf.TensorSpec."
        )
    return f"{tensor.dtype.name} {tensor.shape.as_list()}"


def with_room(
    tensor: tf.Tensor, needed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Pad the last axis to one of ``ROOMS``."""
    rooms = tf.constant(ROOMS, tf.int64)
    step = tf.searchsorted(rooms, needed[tf.newaxis])[0]
    padding = tf.gather(rooms, step) - tf.shape(tensor, tf.int64)[-1]
    before = [[0, 0]] * (tensor.shape.rank - 1)
    return tf.pad(tensor, [*before, [0, padding]]), FIRST_OF_ROOMS + step


def as_words(vector: tf.Tensor, words: int) -> tf.Tensor:
    """Return the first elements of a vector as so many numbers of 64 bits."""
    elements = words * tf.int64.size // vector.dtype.size
    first = vector[:elements]
    padded = tf.pad(first, [[0, elements - tf.size(first)]])
    if vector.dtype.size == tf.int64.size:
        return tf.bitcast(padded, tf.int64)
    return tf.bitcast(tf.reshape(padded, [words, -1]), tf.int64)


def packed(
    tensors: Sequence[tf.Tensor],
    send: Callable[[tf.Tensor, str], tf.Tensor],
    key: str,
) -> list[tf.Tensor]:
    """Send N tensors, small ones of a dtype together.

    Args:
        tensors: what to send; empty ones are not.
        send: sends a tensor under a key, and returns one of its shape.
    """
    results = list(tensors)
    for number, members in enumerate(_packs(tensors)):
        name = f"{key}.{number}"
        if len(members) == 1:
            results[members[0]] = send(tensors[members[0]], name)
            continue
        flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in members], 0)
        sizes = [tensors[i].shape.num_elements() for i in members]
        parts = tf.split(send(flat, name), sizes)
        for i, part in zip(members, parts, strict=True):
            results[i] = tf.reshape(part, tensors[i].shape)
    return results


def _packs(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Group the tensors that are not empty."""
    # The backward pass computes the last gradient first, so the groups go from
    # last to first.
    packs: list[list[int]] = []
    still_open: dict[tf.DType, tuple[list[int], int]] = {}
    for i in reversed(range(len(tensors))):
        elements = tensors[i].shape.num_elements()
        if elements == 0:
            continue
        size = (elements or 0) * tensors[i].dtype.size
        if elements is None or size >= _PACK_BYTES:
            packs.append([i])
            continue
        members, filled = still_open.get(tensors[i].dtype, ([], 0))
        if not members or filled + size > _PACK_BYTES:
            members, filled = [], 0
            packs.append(members)
        members.append(i)
        still_open[tensors[i].dtype] = members, filled + size
    return packs
