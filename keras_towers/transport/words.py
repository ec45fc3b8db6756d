"""Tensors as vectors of integers, which can be added without loss.

An engine that only sums can also carry: if all ranks but one add zeros, the sum
is what that one has. Floats would not do, since 0 times or plus a NaN is NaN,
and -0 plus 0 is 0. Their bits, as integers, do.
"""

from __future__ import annotations

import tensorflow as tf

WORD = tf.int32
"""The dtype of a word: the integer that every engine sums."""


def words_per_element(dtype: tf.DType) -> int:
    """How many words one element takes; small elements take one each."""
    return max(1, dtype.size // WORD.size)


def to_words(tensor: tf.Tensor) -> tf.Tensor:
    """The elements of a tensor, bit by bit.

    Args:
        tensor: of any shape, and any dtype of fixed size.

    Returns:
        int32 [elements * words_per_element(dtype)].

    Example:
        >>> to_words(tf.constant([[1.0, -0.0]])).numpy()
        array([ 1065353216, -2147483648], dtype=int32)
    """
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, WORD)
    elif tensor.dtype.size < WORD.size:
        tensor = tf.cast(tf.bitcast(tensor, _small(tensor.dtype)), WORD)
    elif tensor.dtype != WORD:
        tensor = tf.bitcast(tensor, WORD)
    return tf.reshape(tensor, [-1])


def from_words(
    words: tf.Tensor, dtype: tf.DType, shape: tf.Tensor
) -> tf.Tensor:
    """The tensor that ``to_words`` was given.

    Args:
        words: int32 [elements * words_per_element(dtype)].
        dtype: of the tensor.
        shape: of the tensor, int32 [rank].
    """
    if dtype == tf.bool:
        tensor = tf.cast(words, dtype)
    elif dtype.size < WORD.size:
        tensor = tf.bitcast(tf.cast(words, _small(dtype)), dtype)
    elif dtype == WORD:
        tensor = words
    else:
        each = words_per_element(dtype)
        rows = tf.reshape(words, [-1, each]) if each > 1 else words
        tensor = tf.bitcast(rows, dtype)
    return tf.reshape(tensor, shape)


def _small(dtype: tf.DType) -> tf.DType:
    return tf.uint8 if dtype.size == 1 else tf.uint16
