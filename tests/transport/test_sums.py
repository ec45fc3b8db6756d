"""Grouping tensors into messages."""

import tensorflow as tf

from keras_towers.transport.sums import MESSAGE_BYTES, messages


def test_messages_begin_with_the_last_and_are_of_one_dtype():
    tensors = [
        tf.zeros([2]),
        tf.zeros([3], tf.int32),
        tf.zeros([0]),
        tf.zeros([2, 2]),
        tf.zeros([1], tf.int32),
    ]
    assert messages(tensors) == [[4, 1], [3, 0]]


def test_a_full_message_is_closed():
    half = tf.zeros([MESSAGE_BYTES // 8])
    assert messages([half] * 3) == [[2, 1], [0]]


def test_unknown_shapes_are_left_out():
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def trace(tensor):
        assert messages([tf.zeros([1]), tensor]) == [[0]]
        return tensor

    trace(tf.ones([1, 2]))
