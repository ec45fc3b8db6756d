"""What TensorFlow's strategies give to a reduction, and what not.

That its values are those of TensorFlow's own reductions is shown in
``tests/compatibility``, where every tower strategy reduces this way.
"""

import tensorflow as tf

from keras_towers import compat
from keras_towers.devices import same_device
from keras_towers.reduction import sum_on_towers
from keras_towers.strategies.extended import ReductionCrossDeviceOps
from tests.reduction.cases import cpus


def on_cpus(*tensors):
    copies = []
    for device, tensor in zip(cpus(len(tensors)), tensors, strict=True):
        with tf.device(device):
            copies.append(tf.identity(tensor))
    return tuple(copies)


def test_a_batch_is_reduced_together_but_for_what_is_no_all_reduce():
    calls = []

    def reduce(grads, devices):
        calls.append(len(grads[0]))
        assert all(map(same_device, devices, cpus(len(devices))))
        return sum_on_towers(grads, devices)

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
    ops = ReductionCrossDeviceOps(reduce)
    results = ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)
    assert calls == [2, 1]
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
    assert calls == [2, 1]
