"""Ranks, here threads, compare variables and get one another's values."""

import pytest
import tensorflow as tf

from keras_towers.fit.weights.agreement import broadcast, compare_variables
from keras_towers.foundation.errors import TowerError
from tests.reduction.ranks import on_ranks

pytestmark = pytest.mark.core


def of_ranks(function):
    results, _ = on_ranks(3, function)
    return results


def test_what_differs_gets_the_value_of_one_rank():
    def agree(transport):
        own = tf.Variable([1.0, float(transport.rank)], name="own")
        equal = tf.Variable(5, name="equal"), tf.Variable(["a"], name="texts")
        differing = compare_variables(transport, [*equal, own])
        broadcast(transport, differing, root=2)
        texts = tf.Variable([f"rank {transport.rank}"], name="texts")
        with pytest.raises(TowerError, match="the texts of texts:0 differ"):
            compare_variables(transport, [texts])
        return [v.name for v in differing], own.numpy().tolist()

    for names, value in of_ranks(agree):
        assert names == ["own:0"] and value == [1, 2]


def test_other_variables_are_refused():
    def compare(transport):
        longer = [tf.Variable(tf.zeros(3 - transport.rank), name="longer")]
        with pytest.raises(TowerError) as caught:
            compare_variables(transport, longer)
        return str(caught.value)

    for different in of_ranks(compare):
        assert "Only on rank 0: longer:0 [3] float32." in different
        assert "Only on rank 1: longer:0 [2] float32." in different
