"""``Lifetimes``: the bytes that a tower has at a time."""

import numpy as np
import tensorflow as tf

from keras_towers.partition import partition_graph
from keras_towers.partition.conversions import LayoutOptions
from keras_towers.partition.layouts import REPLICATED, Sharded
from keras_towers.partition.lifetimes import (
    AssumedBatch,
    Lifetimes,
    bytes_of_all,
)
from keras_towers.partition.local_step import to_local_step
from tests.partition.kit import replicated, sharded, trace


def lifetimes(step, layouts, specs, towers=2, rows=8):
    traced = tf.function(step, autograph=False).get_concrete_function(*specs)
    graph = traced.graph
    program = partition_graph(graph, layouts, graph.outputs)
    return program, Lifetimes(program, towers, rows)


def test_a_result_lives_until_its_last_use():
    def step(x):
        wide = tf.cumsum(tf.cumsum(x))
        return tf.reduce_sum(tf.reshape(wide, [-1]) ** 2)

    spec = tf.TensorSpec([100, None])
    program, found = lifetimes(step, [Sharded(1)], [spec])
    one = 8 * 100 * 4
    # An operation's input and its result; a reshape has no memory of its own.
    # The batch is gone after its use.
    assert 2 * one <= found.most_bytes() < 2 * one + 100
    assert found.bytes_of([program.inputs.of_graph[0]]) == one
    # Of four micro-batches the batch is there, and two results of one.
    in_parts = Lifetimes(program, 8, 2, parts=4).most_bytes()
    assert one + one / 4 <= in_parts < one + one / 2 + 100


def test_what_is_used_later_lives_longer():
    def step(x, w):
        hidden = x @ w
        return tf.reduce_sum(tf.exp(tf.exp(hidden)) * hidden)

    specs = [tf.TensorSpec([None, 2]), tf.TensorSpec([2, 50])]
    _, found = lifetimes(step, [Sharded(0), REPLICATED], specs)
    weight, hidden = 2 * 50 * 4, 8 * 50 * 4
    most = found.most_bytes()
    # Two of them at the product, which takes the memory of one, as the second
    # ``exp`` has; then neither the batch nor the weight is.
    assert 2 * hidden <= most < 2 * hidden + weight


def laid_out(function, *given):
    graph = trace(function, *given)
    layouts = [g.layout for g in given]
    program = partition_graph(
        graph, layouts, graph.outputs, options=LayoutOptions(xla=True)
    )
    return program, graph


def test_rows_of_a_tower_and_of_all_towers_belong_together():
    def products(x):
        z = tf.tanh(x)
        return tf.linalg.band_part(tf.matmul(z, z, transpose_b=True), 0, -1)

    program, _ = laid_out(products, sharded(-1, 3))
    assumed = AssumedBatch(program, 4, 8)
    (own,) = [t for t in program.inputs.of_graph if t.on_towers]
    gathered = [e.result for e in program.exchanges if e.kind == "gather"]
    first, *others = assumed.inputs_of([own, *gathered])
    assert first.shape == [8, 3]
    assert [32, 3] in [spec.shape.as_list() for spec in others]


def test_sizes_are_entries():
    program, _ = laid_out(
        lambda x, y: tf.reduce_sum(x) + y, sharded(-1, 3), replicated(2)
    )
    total, given = program.inputs.total, program.inputs.of_graph[1]
    entries, spec = AssumedBatch(program, 3, 8).inputs_of([total, given])
    np.testing.assert_array_equal(entries, 24)
    assert spec == tf.TensorSpec([2], tf.float32)


def test_the_step_of_one_process_also_counts_the_rows_of_all():
    def checked(x):
        count = tf.shape(x)[0]
        assertion = tf.debugging.Assert(count < 99, [count])
        with tf.control_dependencies([assertion]):
            return tf.tanh(x)

    program, _ = laid_out(checked, sharded(-1, 3))
    local = to_local_step(program, {}).program
    (rows,) = AssumedBatch(local, 2, 8).inputs_of([local.results[0]])
    assert rows.shape[1] == 3


def test_the_bytes_of_all_follow_from_the_layout():
    def step(x, w):
        rows = tf.reshape(x, [-1, 4]) @ w
        return tf.exp(tf.reshape(rows, [-1, 3 * 50]))

    specs = [tf.TensorSpec([None, 3, 4]), tf.TensorSpec([4, 50])]
    program, found = lifetimes(step, [Sharded(0), REPLICATED], specs)
    most = bytes_of_all(program, 2, 8)
    # Rows of a tower: of the input, and each three times: product and reshape.
    assert most >= 8 * 3 * (4 + 50 + 50 + 50) * 4
    assert found.most_bytes() < most < 2 * found.most_bytes() + 8 * 3 * 100 * 4
