"""What TensorFlow's strategies give to a reduction, and what not.

That its values are those of TensorFlow's own reductions is shown in
``tests/compatibility``, where every tower strategy reduces this way.
"""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers import compat
from keras_towers.devices import same_device
from keras_towers.reduction import GradientPacker, packed, sum_on_towers
from keras_towers.strategies.extended import ReductionCrossDeviceOps
from tests.reduction.cases import cpus, make_reduction

TOWERS = 4


class Spy:
    """Reduces, and remembers how many gradients came in each call."""

    def __init__(self, reduce=sum_on_towers):
        self.reduce = reduce
        self.calls = []

    def __call__(self, grads, devices):
        self.calls.append(len(grads[0]))
        assert all(map(same_device, devices, cpus(len(devices))))
        return self.reduce(grads, devices)


def replica():
    """The number of this replica, from 1."""
    context = tf.distribute.get_replica_context()
    return float(context.replica_id_in_sync_group) + 1.0


@pytest.mark.parametrize(
    ("operation", "total", "graph"), [("SUM", 10.0, False), ("MEAN", 2.5, True)]
)
def test_all_reduce(operation, total, graph):
    packer = GradientPacker(num_split=2, min_elements=1)
    spy = Spy(packed(make_reduction("collective", TOWERS), packer))
    strategy = tf.distribute.MirroredStrategy(
        cpus(TOWERS), cross_device_ops=ReductionCrossDeviceOps(spy)
    )

    def run():
        def body():
            context = tf.distribute.get_replica_context()
            rows, shape = tf.constant([5]), tf.constant([11, 3])
            slices = tf.IndexedSlices(tf.fill([1, 3], replica()), rows, shape)
            values = [tf.fill([3], replica()), tf.fill([], 2 * replica())]
            return context.all_reduce(operation, [*values, slices])

        return strategy.run(body)

    *results, slices = (tf.function(run) if graph else run)()
    assert spy.calls == [3]
    for result, expected in zip(results, [[total] * 3, 2 * total], strict=True):
        assert len(result.values) == TOWERS
        for value, device in zip(result.values, cpus(TOWERS), strict=True):
            np.testing.assert_array_equal(value, expected)
            # What a graph returns may be moved.
            assert graph or same_device(value.device, device)
    for value in slices.values:
        expected = [[total] * 3 if row == 5 else [0] * 3 for row in range(11)]
        np.testing.assert_array_equal(tf.convert_to_tensor(value), expected)


def on_cpus(*tensors):
    copies = []
    for device, tensor in zip(cpus(len(tensors)), tensors, strict=True):
        with tf.device(device):
            copies.append(tf.identity(tensor))
    return tuple(copies)


def test_a_batch_is_reduced_together_but_for_what_is_no_all_reduce():
    spy = Spy()
    ones = compat.PerReplica(on_cpus(tf.ones([2]), tf.ones([2])))
    tens = compat.PerReplica(on_cpus(tf.fill([], 10.0), tf.fill([], 10.0)))
    more = compat.PerReplica(on_cpus(*[tf.ones([1])] * 3))
    # TensorFlow keeps int32 on the host.
    integers = compat.PerReplica(on_cpus(tf.constant([1]), tf.constant([1])))
    beside = compat.PerReplica((tf.ones([1]), tf.ones([1])))
    pairs = [
        (ones, ones),
        (ones, "/device:CPU:5"),
        (more, more),
        (tens, ones),
        (integers, integers),
        (beside, beside),
    ]
    ops = ReductionCrossDeviceOps(spy)
    results = ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)
    assert spy.calls == [2, 1]
    elsewhere = results.pop(1)
    assert elsewhere.numpy().tolist() == [2, 2]
    assert same_device(elsewhere.device, "/device:CPU:5")
    found = [[v.numpy().tolist() for v in each.values] for each in results]
    assert found[0] == [[2, 2]] * 2
    assert found[1:3] == [[[3]] * 3, [20, 20]]
    assert [values[0] for values in found[3:]] == [[2], [2]]
    # Means of integers are TensorFlow's to define.
    long = compat.PerReplica(on_cpus(*[tf.constant([3], tf.int64)] * 2))
    ops.reduce(tf.distribute.ReduceOp.MEAN, long, long)
    assert spy.calls == [2, 1]
