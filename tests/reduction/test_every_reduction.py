"""What holds for all reductions, whatever their way to the sum."""

import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction import GradientPacker, packed, sum_on_towers
from tests.reduction.cases import (
    REDUCTIONS,
    assert_placed,
    assert_sums,
    compiled,
    cpus,
    make_gradients,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_tower_gets_the_sum(name):
    towers = 4 if name == "hierarchical" else 3
    reduce, devices = REDUCTIONS[name](towers), cpus(towers)
    packer = GradientPacker(num_split=3, min_elements=2)
    for function in (reduce, packed(reduce, packer)):
        step = compiled(function, devices)
        for seed in range(2):
            grads = make_gradients(towers, seed)
            assert_sums(step(grads), grads)
    results = reduce(grads, devices)
    assert_sums(results, grads)
    assert_placed(results, devices)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_one_tower_no_gradients_and_unlike_ones(name):
    (grads,) = make_gradients(1)
    (results,) = REDUCTIONS[name](1)([grads], cpus(1))
    assert all(map(lambda one, other: one is other, results, grads))
    reduce = REDUCTIONS[name](2)
    assert reduce([[], []], cpus(2)) == [[], []]
    with pytest.raises(TowerError, match="Gradient 1 .* tower 1"):
        reduce([[ONES, ONES], [ONES, tf.ones([1])]], cpus(2))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_shapes_known_only_at_run_time_and_before(name):
    reduce = REDUCTIONS[name](2)
    row = [tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([4, 3])]

    @tf.function(input_signature=[[row, row]])
    def step(grads):
        results = reduce(grads, cpus(2))
        assert results[1][1].shape == [4, 3]
        return results

    result = step([[tf.ones([5, 2]), tf.ones([4, 3])]] * 2)[1]
    assert [tensor.numpy().tolist() for tensor in result] == [
        [[2.0] * 2] * 5,
        [[2.0] * 3] * 4,
    ]


def slices(width, dtype=tf.float32):
    rows = tf.zeros([2], tf.int64)
    return tf.IndexedSlices(tf.ones([2, width], dtype), rows)


ONES = tf.ones([2])
FIRST = [ONES, slices(3)]
UNLIKE = [
    ([ONES], "1 is None on tower 1, but a tf.IndexedSlices .* on tower 0"),
    ([ONES, ONES], "1 is a tf.Tensor .* on tower 1, but a tf.IndexedSlices"),
    ([ONES, slices(4)], r"1 is .* \(None, 4\) on .* but .* \(None, 3\)"),
    (
        [tf.ones([3]), slices(3)],
        r"Gradient 0 is .* \(3,\) on tower 1, but .* \(2,\) on tower 0",
    ),
    (
        [ONES, slices(3, tf.float64)],
        "1 is .* float64 .* but .* float32",
    ),
    ([ONES, None], "Gradient 1 is None on tower 1"),
]


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        *(([FIRST, other], message) for other, message in UNLIKE),
        ([FIRST], "of 1 towers for 2 devices"),
        ([], "at least one"),
    ],
)
def test_what_differs_is_named(grads, message):
    with pytest.raises(TowerError, match=message):
        sum_on_towers(grads, cpus(2))
