"""Keys of collectives: alike on all ranks, never twice."""

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

    @tf.function(autograph=False)
    def outer(x):
        note()
        tf.cond(tf.constant(True), note, lambda: 1)
        inner()
        seen.append(next_key("other"))

    # A second trace uses the same keys.
    for size in (2, 3):
        outer(tf.zeros([size]))
        assert seen[:2] == ["kt.sum.1", "kt.sum.2"]
        assert seen[-1] == "kt.other.1"
        seen.clear()
