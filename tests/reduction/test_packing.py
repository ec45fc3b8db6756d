"""Gradients packed into buffers: what they are, and what is left alone."""

import logging

import numpy as np
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


def buffers_of(grads, *arguments, **options):
    """What gradients are packed into, and unpacked from."""
    plan = GradientPacker(*arguments, **options).plan(grads)
    buffers = plan.pack(grads)
    for one, other in zip(grads, plan.unpack(buffers), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    return buffers


@pytest.mark.parametrize(
    "shapes", [[[100]], [[]] * 37, [[5, 10], [1], [], [50]], [[3], [2, 9, 5]]]
)
@pytest.mark.parametrize("num_split", [1, 3, 8])
def test_buffers_are_equal_and_in_order_and_undone(shapes, num_split):
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    grads = [*map(tf.reshape, parts, shapes)]
    buffers = buffers_of(grads, num_split, min_elements=1)
    lengths = [len(buffer) for buffer in buffers]
    assert len(lengths) == num_split
    assert max(lengths) - min(lengths) <= 1
    np.testing.assert_array_equal(np.concatenate(buffers), range(ends[-1]))


@pytest.mark.parametrize(
    ("split_bytes", "expected"), [(400, 1), (399, 2), (100, 4)]
)
def test_size_of_buffers_decides_their_number(split_bytes, expected):
    grads = [tf.zeros([60]), tf.zeros([40])]
    buffers = buffers_of(grads, split_bytes=split_bytes, min_elements=1)
    assert len(buffers) == expected
    assert all(len(buffer) * 4 <= split_bytes for buffer in buffers)


def test_dtypes_have_buffers_of_their_own():
    kinds = [(8, "float32"), (6, "float16"), (4, "float32"), (2, "float64")]
    grads = [tf.cast(tf.range(size), dtype) for size, dtype in kinds]
    buffers = buffers_of(grads, num_split=2, min_elements=3)
    found = [(len(buffer), buffer.dtype.name) for buffer in buffers]
    halves = [(6, "float32")] * 2 + [(3, "float16")] * 2
    assert found == [*halves, (2, "float64")]
    assert buffers[-1] is grads[3]


def test_too_few_elements_are_left_alone_and_said_once(caplog):
    grads = [tf.zeros([1024]), tf.zeros([1023])]
    packer = GradientPacker(num_split=2)
    with caplog.at_level(logging.DEBUG, "keras_towers"):
        assert packer.plan(grads) is packer.plan(grads) is None
    assert [record.message for record in caplog.records] == [
        "not packed: 2 gradients of float32, because 2047 elements are fewer "
        "than 1024 in each of 2 buffers"
    ]
    assert packer.plan([*grads, tf.zeros([])]) is not None


def test_unknown_shapes_are_left_alone_and_said(caplog):
    @tf.function
    def step(*grads):
        packer = GradientPacker(num_split=2, min_elements=1)
        plan = packer.plan(grads)
        assert packer.plan(grads[1:]) is None
        return plan.pack(grads), plan.unpack(plan.pack(grads))

    grads = tf.range(6.0), tf.ones([3, 2])
    specs = tf.TensorSpec([6]), tf.TensorSpec([None, 2])
    with caplog.at_level(logging.DEBUG, "keras_towers"):
        step = step.get_concrete_function(*specs)
    assert "gradient 1, because its shape (None, 2) is not" in caplog.text
    buffers, back = step(*grads)
    assert [b.shape.as_list() for b in buffers] == [[3], [3], [3, 2]]
    for one, other in zip(grads, back, strict=True):
        np.testing.assert_array_equal(one, other)


def test_wrapped_reduction_sees_buffers_and_slices(spy):
    grads = make_gradients(3)
    step = packed(spy, GradientPacker(num_split=2, min_elements=10))
    assert_sums(step(grads, cpus(3)), grads)
    for device, row in zip(cpus(3), *spy.seen, strict=True):
        kinds = [isinstance(part, tf.IndexedSlices) for part in row]
        assert sum(kinds) == 2
        assert not any(kinds[:2])
        assert [len(part) for part in row[:2]] == [23, 23]
        assert all(same_device(part.device, device) for part in row[:2])


def test_wrapped_reduction_gets_all_as_it_is_when_nothing_is_packed(spy):
    few, one = make_gradients(2), [[tf.zeros([99])]]
    packed(spy, GradientPacker())(few, cpus(2))
    packed(spy, GradientPacker(min_elements=1))(one, cpus(1))
    assert spy.seen[0] is few
    assert spy.seen[1] is one


def test_bad_arguments_and_towers_that_differ_are_refused(spy):
    for name in ("num_split", "split_bytes", "min_elements"):
        with pytest.raises(TowerError, match=f"{name}=0"):
            GradientPacker(**{name: 0})
    step = packed(spy, GradientPacker(min_elements=1))
    with pytest.raises(TowerError, match="Gradient 0 "):
        step([[tf.zeros([20])], [tf.zeros([21])]], cpus(2))
    assert not spy.seen
