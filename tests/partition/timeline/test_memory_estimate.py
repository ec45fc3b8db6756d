"""``MemoryEstimate``: the bytes that a tower has at a time."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.memory_estimate import (
    MemoryEstimate,
    held_tensors,
    rounds_over_ranks,
)
from tests.partition.kit import by_hand, earliest, laid_out, replicated, sharded


def estimate(step, *given, towers=2, rows=8):
    timeline = earliest(laid_out(step, *given), towers, rows)
    sizes = TensorSizes(timeline.program, towers, rows)
    return timeline, MemoryEstimate(timeline, sizes)


def test_a_result_lives_until_its_last_use():
    def step(x):
        wide = tf.cumsum(tf.cumsum(x))
        return tf.reduce_sum(tf.reshape(wide, [-1]) ** 2)

    timeline, found = estimate(step, sharded(100, -1))
    one = 8 * 100 * 4
    # An operation's input and its result; a reshape has no memory of its own.
    # The batch is gone after its use.
    assert 2 * one <= found.peak_bytes() < 2 * one + 100
    assert found.bytes_of(timeline.program.inputs.of_graph[0]) == one
    # Of four micro-batches the batch is there, and two results of one.
    sizes = TensorSizes(timeline.program, 8, 2)
    in_parts = MemoryEstimate(timeline, sizes, parts=4).peak_bytes()
    assert one + one / 4 <= in_parts < one + one / 2 + 100


def test_what_is_used_later_lives_longer():
    def step(x, w):
        hidden = x @ w
        return tf.reduce_sum(tf.exp(tf.exp(hidden)) * hidden)

    _, found = estimate(step, sharded(-1, 2), replicated(2, 50))
    weight, hidden = 2 * 50 * 4, 8 * 50 * 4
    most = found.peak_bytes()
    # Two of them at the product, which takes the memory of one, as the second
    # ``exp`` has; then neither the batch nor the weight is.
    assert 2 * hidden <= most < 2 * hidden + weight


def test_a_result_takes_over_only_what_ends_and_is_as_large():
    def broadcast(x, w):
        return tf.reduce_sum(tf.tanh(x) + w)

    def looped(x):
        start = tf.exp(x)
        _, end = tf.while_loop(
            lambda k, y: k < 3, lambda k, y: (k + 1, tf.tanh(y)), (0, start)
        )
        return tf.reduce_sum(start * end + x)

    _, found = estimate(broadcast, sharded(-1, 1), replicated(50))
    assert found.peak_bytes() >= (8 + 50 + 8 * 50) * 4
    _, found = estimate(looped, sharded(-1, 50))
    assert found.peak_bytes() >= 3 * 8 * 50 * 4


# Towers that share memory add up in the memory of one of them. Of micro-batches
# the inputs are there, and a sum over earlier ones.
@pytest.mark.parametrize(
    ("options", "live"),
    [
        ({}, [800, 400, 800, 800]),
        ({"sharing": 2}, [1600, 800, 800, 800]),
        ({"parts": 2}, [1600, 800, 800, 800]),
    ],
)
def test_the_bytes_at_each_time(options, live):
    builder, shape = Builder(), tf.TensorShape([10, 10])
    x = Tensor(tf.float32, shape, BATCH)
    product = builder.op("MatMul", [x, x], shape)
    total = builder.exchange("sum", builder.op("Exp", [product], shape))
    result = builder.op("MatMul", [total, total], shape)
    timeline = earliest(by_hand(builder, x, results=[result]), 1, 1)
    sizes = TensorSizes(timeline.program, 1, 1)
    assert MemoryEstimate(timeline, sizes, **options).live == live


def test_a_list_is_once_in_memory_whatever_loops_do_to_it():
    def step(x):
        array = tf.TensorArray(tf.float32, 10, element_shape=x.shape)

        def fill(k, array):
            return k + 1, array.write(k, x)

        def change(k, array):
            return k + 1, array.write(k, tf.exp(array.read(k)))

        def below_ten(k, array):
            return k < 10

        _, array = tf.while_loop(below_ten, fill, (0, array))
        _, array = tf.while_loop(below_ten, change, (0, array))
        return array.read(9)

    _, found = estimate(step, sharded(-1, 50))
    rows = 8 * 50 * 4
    # The list, the batch, and what is read.
    assert 10 * rows <= found.peak_bytes() <= 12 * rows + 100


def test_ranks_exchange_beside_the_next_level():
    def step(x):
        product = tf.matmul(x, x, transpose_a=True)
        total = tf.reduce_sum(tf.sin(x), 0)
        return product, tf.reduce_sum(tf.exp(x - total))

    timeline, found = estimate(step, sharded(-1, 50), rows=100)
    product, total, last = 50 * 50 * 4, 50 * 4, 4
    assert found.peak_bytes_over_ranks() == found.peak_bytes() + product
    # The second level does not wait for the first.
    sizes = TensorSizes(timeline.program, 2, 100)
    both, second = rounds_over_ranks(timeline, sizes)
    assert (sorted(both["sum"]), *both) == ([last, total, product], "sum")
    assert second == {"sum": [last]}


def test_what_a_later_level_repeats_keeps_what_it_uses():
    """A level computes sizes again, from the tensors that have them."""
    builder, shape = Builder(), tf.TensorShape([100])
    x = Tensor(tf.float32, tf.TensorShape([1]), BATCH)
    wide = builder.op("Tile", [x, [100]], shape)
    total = builder.exchange("sum", builder.op("Sum", [wide, 0], ()))
    size = builder.cast(builder.axis_size(wide), tf.float32)
    row = builder.op("Reshape", [total, [1]], [1])
    results = [builder.op("Mul", [row, size], [1])]
    timeline = earliest(by_hand(builder, x, results=results), 1, 1)
    found = MemoryEstimate(timeline, TensorSizes(timeline.program, 1, 1))
    *_, exchanged, first, last = found.live
    assert exchanged >= 400 > last
    assert first >= 400
    assert held_tensors(timeline) == {wide}


def test_what_later_levels_use_is_held_of_all_micro_batches():
    builder, shape = Builder(), tf.TensorShape([4])
    x, whole = Tensor(tf.float32, shape, BATCH), Tensor(tf.float32, shape)
    used_later, gathered = (
        builder.op(type_, [x], shape) for type_ in ("Exp", "Sin")
    )
    builder.op("Neg", [used_later], shape)
    total = builder.exchange("sum", builder.op("Cos", [x], shape))
    builder.exchange("gather", gathered)
    # It is computed again, and what does not vary is there once.
    size = builder.compute_size("Mul", builder.axis_size(x), 2)
    builder.op("Fill", [builder.size_vector([size], tf.int64), total], shape)
    builder.op("Mul", [used_later, total], shape)
    builder.op("Add", [whole, total], shape)
    held = held_tensors(earliest(by_hand(builder, x, whole)))
    assert held == {used_later, gathered}
