"""``AbsentRanks``: exchanges that have shapes, and no ranks."""

import pytest
import tensorflow as tf

from keras_towers.transport.absent_ranks import AbsentRanks


@pytest.mark.parametrize(
    ("exchange", "rows"),
    [
        (lambda ranks, x: ranks.all_reduce([x], "k")[0], 5),
        (lambda ranks, x: ranks.reduce_scatter(x, [2, 2, 1], "k"), 1),
        (lambda ranks, x: ranks.all_gather(x[:1], "k", [2, 2, 1]), 5),
        (lambda ranks, x: ranks.broadcast([x], "k")[0], 5),
    ],
)
def test_results_have_the_shapes_of_the_last_rank(exchange, rows):
    ranks = AbsentRanks(3)
    assert (ranks.rank, ranks.size) == (2, 3)
    with tf.Graph().as_default():
        given = tf.ones([5, 4], tf.bfloat16)
        result = exchange(ranks, given)
    assert (result.shape, result.dtype) == ((rows, 4), tf.bfloat16)


def test_messages_are_those_of_an_engine():
    assert AbsentRanks(3).message_bytes("scatter", 6) == 6
    assert AbsentRanks(3).message_bytes("sum", 6) == 0
    engine = AbsentRanks(3, 2, lambda kind, size, ranks: size * ranks)
    assert engine.message_bytes("sum", 6) == 18
    assert (engine.local_rank, engine.local_size) == (1, 2)
