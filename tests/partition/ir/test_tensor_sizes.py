"""``TensorSizes``: how large the tensors of a program are."""

import functools

import tensorflow as tf

from keras_towers.partition.ir.effects import LOOPS
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from tests.partition import kit
from tests.partition.kit import replicated, sharded

laid_out = functools.partial(kit.laid_out, xla=True)


def sizes_of(program, type_, towers=4, rows=8):
    """Return the entries of what operations of a type make."""
    sizes = TensorSizes(program, towers, rows)
    return [
        sizes.entries(o.outputs[0])
        for o in program.operations
        if o.type == type_
    ]


def test_rows_of_a_tower_and_of_all_towers_belong_together():
    def products(x):
        z = tf.tanh(x)
        return tf.linalg.band_part(tf.matmul(z, z, transpose_b=True), 0, -1)

    program = laid_out(products, sharded(-1, 3))
    sizes = TensorSizes(program, 4, 8)
    (own,) = [t for t in program.inputs.of_graph if "towers" in t.axes]
    gathered = [e.result for e in program.exchanges if e.kind == "gather"]
    assert sizes.bytes_of(own) == 8 * 3 * 4
    # All rows, and the products of all rows with all others.
    assert list(map(sizes.bytes_of, gathered)) == [32 * 3 * 4, 32 * 32 * 4]


def test_rows_of_a_known_batch_are_divided():
    program = laid_out(tf.tanh, sharded(-1, 5, examples=64))
    assert sizes_of(program, "Tanh", towers=4, rows=16) == [16 * 5]


def test_several_rows_of_an_example_count():
    def step(x, w):
        rows = tf.reshape(x, [-1, 4]) @ w
        return tf.exp(tf.reshape(rows, [-1, 3 * 50]))

    program = laid_out(step, sharded(-1, 3, 4), replicated(4, 50))
    assert sizes_of(program, "MatMul") == sizes_of(program, "Exp") == [8 * 150]


def test_a_list_is_as_large_as_what_it_holds():
    def step(x):
        rounds = tf.TensorArray(tf.float32, 3, element_shape=[None, 5])
        for index in range(3):
            rounds = rounds.write(index, x * index)
        return tf.reduce_sum(rounds.stack(), 0)

    program = laid_out(step, sharded(-1, 5))
    sizes = TensorSizes(program, 2, 8)
    lists = [
        sizes.bytes_of(t)
        for o in program.operations
        for t in o.outputs
        if t.dtype == tf.variant and o.type == "TensorListSetItem"
    ]
    assert lists and set(lists) == {3 * 8 * 5 * 4}


def test_lists_of_a_loop_hold_what_no_variable_has():
    variable = tf.Variable(tf.ones([5, 5]))

    def step(x):
        with tf.GradientTape() as tape:
            _, last = tf.while_loop(
                lambda k, h: k < 6,
                lambda k, h: (k + 1, tf.tanh(h @ variable)),
                [0, x],
                maximum_iterations=6,
            )
            loss = tf.reduce_sum(last)
        return tape.gradient(loss, variable)

    program = kit.laid_out(step, sharded(-1, 5))
    sizes = TensorSizes(program, 2, 8)
    forward, *_ = [o for o in program.operations if o.type in LOOPS]
    lists = [
        sizes.bytes_of(t) for t in forward.outputs if t.dtype == tf.variant
    ]
    # The state of each round is what the one before has returned.
    assert sorted(lists) == [0, 0, 6 * 8 * 5 * 4]


def test_what_a_branch_keeps_for_its_gradient_counts_once():
    def step(x, weight):
        with tf.GradientTape() as tape:
            tape.watch(weight)
            way = tf.reduce_sum(weight) > 0
            taken = tf.cond(way, lambda: tf.sin(x @ weight), lambda: x)
            loss = tf.reduce_sum(taken)
        return tape.gradient(loss, weight)

    program = kit.laid_out(step, sharded(-1, 5), replicated(5, 5))
    sizes = TensorSizes(program, 2, 8)
    branch, *_ = [o for o in program.operations if o.type == "StatelessIf"]
    kept = [sizes.bytes_of(t) for t in branch.outputs if t.dtype == tf.variant]
    assert kept and max(kept) == 8 * 5 * 4
