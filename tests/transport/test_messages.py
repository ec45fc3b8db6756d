"""Tensors as words, and small ones that travel together."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.transport.messages import (
    MESSAGE_BYTES,
    from_words,
    group_by_bytes,
    number_of_words,
    words_of,
)

pytestmark = pytest.mark.core
DTYPES = (
    *(tf.bool, tf.int8, tf.uint16, tf.float16, tf.bfloat16, tf.int32),
    *(tf.uint32, tf.float32, tf.int64, tf.complex64, tf.complex128),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3)], ids=str)
def test_bits_come_back(dtype, shape):
    count = int(np.prod(shape))
    bits = np.random.default_rng(0).integers(0, 256, (count, dtype.size))
    if dtype == tf.bool:
        bits %= 2
    array = bits.astype(np.uint8).view(dtype.as_numpy_dtype).reshape(shape)
    tensor = tf.constant(array)
    words = words_of(tensor)
    assert words.dtype == tf.int32
    assert words.shape == number_of_words(dtype, tensor.shape)
    # As other ranks pad it to the longest.
    back = from_words(tf.pad(words, [[0, 2]]), dtype, tensor.shape)
    assert back.dtype == dtype and back.shape == shape
    assert back.numpy().tobytes() == array.tobytes()


def test_words_of_a_known_shape_have_a_known_length():
    @tf.function(input_signature=[tf.TensorSpec([3, 5], tf.bfloat16)])
    def traced(tensor):
        assert words_of(tensor).shape == (8,)
        return tensor

    traced.get_concrete_function()


def test_messages_begin_with_the_last_and_are_of_one_dtype():
    floats = [tf.zeros([2]), tf.zeros([0]), tf.zeros([2, 2])]
    first, second = tf.zeros([3], tf.int32), tf.zeros([1], tf.int32)
    tensors = [floats[0], first, *floats[1:], second]
    assert group_by_bytes(tensors) == [[4, 1], [3, 0]]


def test_a_full_message_is_closed():
    half = tf.zeros([MESSAGE_BYTES // 8])
    assert group_by_bytes([half] * 3) == [[2, 1], [0]]
    # What is large needs no company, and is not copied.
    large = tf.zeros([MESSAGE_BYTES // 4])
    small = tf.zeros([1])
    assert group_by_bytes([small, large, small]) == [[2, 0], [1]]


def test_a_tensor_of_unknown_shape_is_a_message():
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def trace(tensor):
        return tf.ragged.constant(group_by_bytes([tf.zeros([1]), tensor]))

    assert trace(tf.ones([1, 2])).to_list() == [[1], [0]]
