"""What holds for all reductions, whatever their way to the sum."""

import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction import GradientPacker, packed
from tests.reduction.cases import (
    REDUCTIONS,
    assert_placed,
    assert_sums,
    compiled,
    cpus,
    make_gradients,
    make_reduction,
    ops_of,
)

pytestmark = pytest.mark.core


def _possible(*numbers):
    """Pairs of a reduction and a number of towers that it can work on."""
    return [
        (name, towers)
        for name in REDUCTIONS
        for towers in numbers
        if make_reduction(name, towers) is not None
    ]


@pytest.mark.parametrize("name,towers", _possible(1, 2, 3, 4, 8))
def test_every_tower_gets_the_sum(name, towers):
    reduce = make_reduction(name, towers)
    devices = cpus(towers)
    grads = make_gradients(towers)
    results = reduce(grads, devices)
    assert_sums(results, grads)
    if towers > 1:
        assert_placed(results, devices)
    step = compiled(reduce, devices)
    for seed in range(3):
        grads = make_gradients(towers, seed)
        assert_sums(step(grads), grads)


@pytest.mark.parametrize("name,towers", _possible(2, 3))
def test_packing_changes_no_sum(name, towers):
    reduce = make_reduction(name, towers)
    devices = cpus(towers)
    grads = make_gradients(towers)
    packer = GradientPacker(num_split=3, min_elements=2)
    step = compiled(packed(reduce, packer), devices)
    assert_sums(step(grads), grads)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_one_tower_gets_its_own_gradients(name):
    grads = make_gradients(1)
    results = make_reduction(name, 1)(grads, cpus(1))
    assert all(
        one is other for one, other in zip(results[0], grads[0], strict=True)
    )


@pytest.mark.parametrize("name", REDUCTIONS)
def test_no_gradients_give_none(name):
    assert make_reduction(name, 2)([[], []], cpus(2)) == [[], []]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_towers_that_differ_are_refused(name):
    reduce = make_reduction(name, 2)
    grads = [[tf.ones([2]), tf.ones([3])], [tf.ones([2]), tf.ones([1])]]
    with pytest.raises(TowerError, match="Gradient 1 .* tower 1"):
        reduce(grads, cpus(2))


@pytest.mark.parametrize("name", ["host", "towers", "hierarchical"])
def test_unread_results_can_be_pruned(name):
    ops = ops_of(make_reduction(name, 4), make_gradients(4), cpus(4))
    assert not [op.name for op in ops if op.op_def.is_stateful]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_results_keep_their_static_shapes(name):
    devices = cpus(2)
    reduce = make_reduction(name, 2)

    @tf.function
    def step(grads):
        results = reduce(grads, devices)
        shapes.append(results[1][0].shape.as_list())
        return results

    shapes = []
    step([[tf.ones([4, 3])], [tf.ones([4, 3])]])
    assert shapes == [[4, 3]]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_shapes_that_are_known_only_at_run_time(name):
    devices = cpus(2)
    reduce = make_reduction(name, 2)
    row = [tf.TensorSpec([None, 2], tf.float32)]
    step = tf.function(lambda grads: reduce(grads, devices))
    step = step.get_concrete_function([row, row])
    results = step([[tf.ones([5, 2])], [tf.ones([5, 2])]])
    assert results[1][0].numpy().tolist() == [[2.0, 2.0]] * 5
