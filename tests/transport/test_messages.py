"""Small tensors that travel together."""

import tensorflow as tf

from keras_towers.transport.messages import MESSAGE_BYTES, packs


def test_messages_begin_with_the_last_and_are_of_one_dtype():
    floats = [tf.zeros([2]), tf.zeros([0]), tf.zeros([2, 2])]
    first, second = tf.zeros([3], tf.int32), tf.zeros([1], tf.int32)
    tensors = [floats[0], first, *floats[1:], second]
    assert packs(tensors) == [[4, 1], [3, 0]]


def test_a_full_message_is_closed():
    half = tf.zeros([MESSAGE_BYTES // 8])
    assert packs([half] * 3) == [[2, 1], [0]]
    # What is large needs no company, and is not copied.
    large = tf.zeros([MESSAGE_BYTES // 4])
    assert packs([tf.zeros([1]), large, tf.zeros([1])]) == [[2, 0], [1]]


def test_a_tensor_of_unknown_shape_is_a_message():
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def trace(tensor):
        return tf.ragged.constant(packs([tf.zeros([1]), tensor]))

    assert trace(tf.ones([1, 2])).to_list() == [[1], [0]]
