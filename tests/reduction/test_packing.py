"""Gradients packed into buffers: what they are, and what is left alone."""

import pytest
import tensorflow as tf

from keras_towers.devices import same_device
from keras_towers.errors import TowerError
from keras_towers.reduction import GradientPacker, packed, sum_on_towers
from tests.reduction.cases import assert_sums, cpus, make_gradients

pytestmark = pytest.mark.core


@pytest.fixture
def spy():
    """Sums, and keeps what it was called with as ``seen``."""

    def reduce(grads, devices):
        reduce.seen.append(grads)
        return sum_on_towers(grads, devices)

    reduce.seen = []
    return reduce


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"num_split": 1}, [[4, 3, 2, 1, 0]]),
        # The last gradients, which are computed first, are in the last one.
        ({"num_split": 2}, [[0], [2, 1], [4, 3]]),
        ({"num_split": 5}, [[0], [1], [2], [3], [4]]),
        ({"num_split": 5, "min_elements": 60}, [[1, 0], [4, 3, 2]]),
    ],
)
def test_gradients_are_grouped_by_size(options, groups):
    grads = [tf.zeros([n]) for n in (20, 20, 20, 10, 30)]
    packer = GradientPacker(**{"min_elements": 1, **options})
    assert packer.groups(grads) == groups


def test_empty_gradients_are_left_out_and_unknown_ones_alone():
    shapes = [[2], [None, 2], [0], [2]]
    grads = [tf.TensorSpec(shape) for shape in shapes]
    assert GradientPacker().groups(grads) == [[1], [3, 0]]


def test_wrapped_reduction_sees_buffers_and_slices(spy):
    grads = make_gradients(3)
    step = packed(spy, GradientPacker(num_split=1))
    assert_sums(step(grads, cpus(3)), grads)
    for device, row in zip(cpus(3), *spy.seen, strict=True):
        kinds = [isinstance(part, tf.IndexedSlices) for part in row]
        assert kinds == [False] * 5 + [True] * 2
        # Those of float32 together: 12, 1 and 33.
        assert len(row[0]) == 46
        assert same_device(row[0].device, device)


def test_one_tower_packs_nothing(spy):
    grads = [[tf.zeros([99])]]
    packed(spy, GradientPacker())(grads, cpus(1))
    assert spy.seen[0] is grads


def test_bad_arguments_and_towers_that_differ_are_refused(spy):
    for name in ("num_split", "min_elements"):
        for number in (0, 1.5, "2"):
            with pytest.raises(TowerError, match=f"{name}={number!r}"):
                GradientPacker(**{name: number})
    step = packed(spy, GradientPacker())
    with pytest.raises(TowerError, match="Gradient 0 "):
        step([[tf.zeros([20])], [tf.zeros([21])]], cpus(2))
    assert not spy.seen
