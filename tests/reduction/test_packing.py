"""Gradients that are packed into buffers before they are exchanged."""

import pytest
import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.reduction.collectives import OnTowers
from keras_towers.reduction.packing import GradientPacker, Packed
from keras_towers.transport.devices import same_device
from tests.reduction.cases import assert_sums, cpus, make_gradients

pytestmark = pytest.mark.core


@pytest.fixture
def spy():
    """Exchanges, and keeps what it was called with as ``seen``."""

    class Spy(OnTowers):
        seen = []

        def all_reduce(self, grads, devices):
            self.seen.append(grads)
            return super().all_reduce(grads, devices)

    return Spy()


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
    step = Packed(spy, GradientPacker(num_split=1)).all_reduce
    assert_sums(step(grads, cpus(3)), grads)
    for device, row in zip(cpus(3), *spy.seen, strict=True):
        kinds = [isinstance(part, tf.IndexedSlices) for part in row]
        # An empty one is alone, as slices are.
        assert (len(kinds), sum(kinds)) == (14, 4)
        # Those of float32 together: 12, 1 and 33.
        assert len(row[0]) == 46
        assert same_device(row[0].device, device)


def test_one_tower_packs_nothing(spy):
    grads = [[tf.zeros([99])]]
    (own,) = Packed(spy, GradientPacker()).all_reduce(grads, cpus(1))
    assert own[0] is grads[0][0]
    assert not spy.seen


def test_bad_arguments_and_towers_that_differ_are_refused(spy):
    for name in ("num_split", "min_elements"):
        for number in (0, 1.5, "2"):
            with pytest.raises(TowerError, match=f"{name}={number!r}"):
                GradientPacker(**{name: number})
    step = Packed(spy, GradientPacker()).all_reduce
    with pytest.raises(TowerError, match="Gradient 0 "):
        step([[tf.zeros([20])], [tf.zeros([21])]], cpus(2))
    assert not spy.seen
