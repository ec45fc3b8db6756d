"""``Lifetimes``: the bytes that a tower has at a time."""

import tensorflow as tf

from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import REPLICATED, Sharded
from keras_towers.partition.lifetimes import Lifetimes


def lifetimes(step, layouts, specs, towers=2, rows=8):
    traced = tf.function(step, autograph=False).get_concrete_function(*specs)
    graph = traced.graph
    program = partition_graph(graph, layouts, graph.outputs)
    return program, Lifetimes(program, towers, rows)


def test_a_result_lives_until_its_last_use():
    def step(x):
        wide = tf.exp(tf.exp(x))
        return tf.reduce_sum(tf.reshape(wide, [-1]) ** 2)

    spec = tf.TensorSpec([None, 100])
    program, found = lifetimes(step, [Sharded(0)], [spec])
    one = 8 * 100 * 4
    # An operation's input and its result; a reshape has no memory of its own.
    # The batch is gone after its use.
    assert 2 * one <= found.most_bytes() < 2 * one + 100
    assert found.bytes_of([program.inputs.of_graph[0]]) == one


def test_what_is_used_later_lives_longer():
    def step(x, w):
        hidden = x @ w
        return tf.reduce_sum(tf.exp(tf.exp(hidden)) * hidden)

    specs = [tf.TensorSpec([None, 10]), tf.TensorSpec([10, 50])]
    _, found = lifetimes(step, [Sharded(0), REPLICATED], specs)
    weight, hidden = 10 * 50 * 4, 8 * 50 * 4
    most = found.most_bytes()
    # Three of them at the product; then neither the batch nor the weight is.
    assert 3 * hidden <= most < 3 * hidden + weight
