import logging
import random

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction import GradientPacker, packed, sum_on_towers
from keras_towers.reduction.placed import same_device
from tests.reduction.cases import assert_sums, cpus, make_gradients

pytestmark = pytest.mark.core


def some_gradients(seed):
    """A random number of gradients of random shapes and dtypes."""
    choice = random.Random(seed)
    dtypes = [tf.float32] * 3 + [tf.float16, tf.float64]
    start = 0
    grads = []
    for _ in range(choice.randint(1, 12)):
        shape = [choice.randint(1, 6) for _ in range(choice.randint(0, 3))]
        size = int(np.prod(shape))
        values = tf.range(start, start + size)
        grads.append(tf.cast(tf.reshape(values, shape), choice.choice(dtypes)))
        start += size
    return grads


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_split", [1, 2, 7])
def test_unpack_undoes_pack(seed, num_split):
    grads = some_gradients(seed)
    plan = GradientPacker(num_split, min_elements=1).plan(grads)
    if plan is None:
        sizes = {}
        for grad in grads:
            sizes[grad.dtype] = sizes.get(grad.dtype, 0) + int(tf.size(grad))
        assert max(sizes.values()) < num_split
        return
    back = plan.unpack(plan.pack(grads))
    for one, other in zip(grads, back, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("sizes", [[100], [1] * 37, [50, 1, 1, 50], [3, 90]])
@pytest.mark.parametrize("num_split", [1, 3, 8])
def test_buffers_are_equal_and_in_order(sizes, num_split):
    ends = np.cumsum(sizes)
    grads = [
        tf.range(end - size, end) for size, end in zip(sizes, ends, strict=True)
    ]
    buffers = GradientPacker(num_split, min_elements=1).plan(grads).pack(grads)
    lengths = [len(buffer) for buffer in buffers]
    assert len(lengths) == num_split
    assert max(lengths) - min(lengths) <= 1
    np.testing.assert_array_equal(np.concatenate(buffers), range(ends[-1]))


@pytest.mark.parametrize(
    ("split_bytes", "expected"), [(400, 1), (399, 2), (100, 4), (10**9, 1)]
)
def test_size_of_buffers_decides_their_number(split_bytes, expected):
    grads = [tf.zeros([60]), tf.zeros([40])]
    plan = GradientPacker(split_bytes=split_bytes, min_elements=1).plan(grads)
    buffers = plan.pack(grads)
    assert len(buffers) == expected
    assert all(len(buffer) * 4 <= split_bytes for buffer in buffers)


def test_dtypes_have_buffers_of_their_own():
    grads = [
        tf.zeros([8]),
        tf.ones([6], tf.float16),
        tf.zeros([4]),
        tf.ones([2], tf.float64),
    ]
    plan = GradientPacker(num_split=2, min_elements=3).plan(grads)
    buffers = plan.pack(grads)
    assert [(b.dtype.name, len(b)) for b in buffers] == [
        ("float32", 6),
        ("float32", 6),
        ("float16", 3),
        ("float16", 3),
        ("float64", 2),
    ]
    assert buffers[-1] is grads[3]


def test_too_few_elements_are_left_alone_and_said_once(caplog):
    grads = [tf.zeros([1024]), tf.zeros([1023])]
    packer = GradientPacker(num_split=2)
    with caplog.at_level(logging.DEBUG, "keras_towers"):
        assert packer.plan(grads) is None
        assert packer.plan(grads) is None
    assert [record.message for record in caplog.records] == [
        "not packed: 2 gradients of float32, because 2047 elements are fewer "
        "than 1024 in each of 2 buffers"
    ]
    assert packer.plan([*grads, tf.zeros([])]) is not None


def test_unknown_shapes_are_left_alone_and_said(caplog):
    @tf.function
    def step(known, unknown):
        packer = GradientPacker(num_split=2, min_elements=1)
        grads = [known, unknown]
        plan = packer.plan(grads)
        assert packer.plan([unknown]) is None
        return plan.pack(grads), plan.unpack(plan.pack(grads))

    spec = tf.TensorSpec([None, 2], tf.float32)
    known = tf.range(6.0)
    unknown = tf.ones([3, 2])
    with caplog.at_level(logging.DEBUG, "keras_towers"):
        step = step.get_concrete_function(known, spec)
    assert "gradient 1, because its shape (None, 2) is not" in caplog.text
    buffers, back = step(known, unknown)
    assert [b.shape.as_list() for b in buffers] == [[3], [3], [3, 2]]
    np.testing.assert_array_equal(back[0], known)
    np.testing.assert_array_equal(back[1], unknown)


def test_wrapped_reduction_sees_buffers_and_slices():
    seen = []

    def spy(grads, devices):
        seen.append(grads)
        return sum_on_towers(grads, devices)

    grads = make_gradients(3)
    step = packed(spy, GradientPacker(num_split=2, min_elements=10))
    assert_sums(step(grads, cpus(3)), grads)
    (rows,) = seen
    for device, row in zip(cpus(3), rows, strict=True):
        kinds = [isinstance(part, tf.IndexedSlices) for part in row]
        assert sum(kinds) == 2
        assert not any(kinds[:2])
        assert [len(part) for part in row[:2]] == [23, 23]
        assert all(same_device(part.device, device) for part in row[:2])


def test_wrapped_reduction_gets_all_as_it_is_when_nothing_is_packed():
    seen = []

    def spy(grads, devices):
        seen.append(grads)
        return sum_on_towers(grads, devices)

    grads = make_gradients(2)
    packed(spy, GradientPacker())(grads, cpus(2))
    assert seen[0] is grads
    one = [[tf.zeros([99])]]
    packed(spy, GradientPacker(min_elements=1))(one, cpus(1))
    assert seen[1] is one


def test_towers_that_differ_are_refused():
    step = packed(sum_on_towers, GradientPacker(min_elements=1))
    with pytest.raises(TowerError, match="Gradient 0 "):
        step([[tf.zeros([20])], [tf.zeros([21])]], cpus(2))


@pytest.mark.parametrize(
    "arguments", [{"num_split": 0}, {"split_bytes": 0}, {"min_elements": 0}]
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(TowerError, match=f"{next(iter(arguments))}=0"):
        GradientPacker(**arguments)
