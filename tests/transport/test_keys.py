"""Keys of collectives: alike on all ranks, never twice in one function."""

import pytest
import tensorflow as tf

from keras_towers.transport import next_key

pytestmark = pytest.mark.core


def test_eager_calls_need_no_number():
    assert next_key("sum") == next_key("sum") == "kt.sum.eager"


def test_every_function_counts_anew_over_its_inner_ones():
    seen = []

    def note():
        seen.append(next_key("sum"))
        return 0

    @tf.function
    def inner():
        return note()

    def outer():
        note()
        tf.cond(tf.constant(True), note, lambda: 1)
        inner()
        seen.append(next_key("other"))

    tf.function(outer, autograph=False)()
    assert seen == ["kt.sum.1", "kt.sum.2", "kt.sum.3", "kt.other.1"]


def test_a_second_trace_uses_the_same_keys():
    seen = []

    @tf.function
    def step(x):
        seen.append(next_key("sum"))
        return x

    step(tf.zeros([2]))
    step(tf.zeros([3]))
    assert seen == ["kt.sum.1", "kt.sum.1"]
