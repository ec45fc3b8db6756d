import numpy as np
import pytest
import tensorflow as tf

from keras_towers import compat
from keras_towers.reduction import (
    GradientPacker,
    ReductionCrossDeviceOps,
    packed,
    sum_on_towers,
)
from keras_towers.reduction.placed import same_device
from tests.reduction.cases import REDUCTIONS, cpus, make_reduction

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


def make_strategy(spy, towers=TOWERS):
    return tf.distribute.MirroredStrategy(
        cpus(towers), cross_device_ops=ReductionCrossDeviceOps(spy)
    )


def replica():
    """The number of this replica, from 1."""
    context = tf.distribute.get_replica_context()
    return float(context.replica_id_in_sync_group) + 1.0


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("operation", ["SUM", "MEAN"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_all_reduce(name, operation, graph):
    spy = Spy(
        packed(
            make_reduction(name, TOWERS),
            GradientPacker(num_split=2, min_elements=1),
        )
    )
    strategy = make_strategy(spy)

    def run():
        def body():
            context = tf.distribute.get_replica_context()
            values = [tf.fill([3], replica()), tf.fill([], 2 * replica())]
            return context.all_reduce(operation, values)

        return strategy.run(body)

    results = (tf.function(run) if graph else run)()
    total = 10.0 if operation == "SUM" else 2.5
    assert spy.calls == [2]
    for result, expected in zip(results, [[total] * 3, 2 * total], strict=True):
        assert len(result.values) == TOWERS
        for value, device in zip(result.values, cpus(TOWERS), strict=True):
            np.testing.assert_array_equal(value, expected)
            # What a graph returns may be moved.
            assert graph or same_device(value.device, device)


@pytest.mark.parametrize("operation", ["SUM", "MEAN"])
def test_slices(operation):
    spy = Spy()
    strategy = make_strategy(spy, 2)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([11, 3]))

    @tf.function
    def run():
        def body():
            grad = tf.IndexedSlices(
                tf.fill([2, 3], replica()),
                tf.constant([5, 5]),
                tf.constant([11, 3]),
            )
            return tf.distribute.get_replica_context().merge_call(
                merge, args=(grad,)
            )

        def merge(strategy, grad):
            (reduced,) = strategy.extended.batch_reduce_to(
                tf.distribute.ReduceOp[operation], [(grad, variable)]
            )
            assert isinstance(reduced, compat.Mirrored)
            sums = strategy.experimental_local_results(reduced)
            return [tf.convert_to_tensor(total) for total in sums]

        return strategy.run(body)

    expected = np.zeros([11, 3])
    expected[5] = 2 * (1 + 2) / (2 if operation == "MEAN" else 1)
    for result in run():
        np.testing.assert_array_equal(result, expected)
    assert spy.calls == [1]


def per_replica(strategy, *values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def test_reduce_to_one_place_and_gather():
    spy = Spy()
    strategy = make_strategy(spy, 2)
    values = per_replica(strategy, tf.constant([1.0]), tf.constant([5.0]))
    assert strategy.reduce("SUM", values, axis=None).numpy() == [6]
    assert strategy.reduce("MEAN", values, axis=None).numpy() == [3]
    assert strategy.gather(values, axis=0).numpy().tolist() == [1, 5]
    assert spy.calls == []


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_means_of_integers_are_those_of_tensorflow(dtype):
    def mean(strategy):
        def body():
            value = tf.cast(tf.fill([2], 3 * replica()), dtype)
            return tf.distribute.get_replica_context().all_reduce("MEAN", value)

        return strategy.run(body).values[1]

    stock = tf.distribute.MirroredStrategy(
        cpus(2), cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    spy = Spy()
    ours, theirs = mean(make_strategy(spy, 2)), mean(stock)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)
    assert spy.calls == []


def test_int32_stays_with_tensorflow():
    spy = Spy()
    values = compat.PerReplica(on_cpus(tf.constant([1]), tf.constant([2])))
    result = ReductionCrossDeviceOps(spy).reduce(
        tf.distribute.ReduceOp.SUM, values, values
    )
    assert [value.numpy().tolist() for value in result.values] == [[3], [3]]
    assert spy.calls == []


def on_cpus(*tensors):
    copies = []
    for device, tensor in zip(cpus(len(tensors)), tensors, strict=True):
        with tf.device(device):
            copies.append(tf.identity(tensor))
    return tuple(copies)


def test_a_batch_is_reduced_together_unless_it_goes_elsewhere():
    spy = Spy()
    ops = ReductionCrossDeviceOps(spy)
    ones = compat.PerReplica(on_cpus(tf.ones([2]), tf.ones([2])))
    tens = compat.PerReplica(on_cpus(tf.fill([], 10.0), tf.fill([], 10.0)))
    more = compat.PerReplica(on_cpus(*[tf.ones([1])] * 3))
    pairs = [
        (ones, ones),
        (ones, "/device:CPU:5"),
        (more, more),
        (tens, ones),
    ]
    results = ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)
    assert spy.calls == [2, 1]
    assert [v.numpy().tolist() for v in results[0].values] == [[2, 2]] * 2
    assert results[1].numpy().tolist() == [2, 2]
    assert same_device(results[1].device, "/device:CPU:5")
    assert [v.numpy().tolist() for v in results[2].values] == [[3]] * 3
    assert [v.numpy() for v in results[3].values] == [20, 20]


def test_values_on_one_device_do_not_reach_the_reduction():
    spy = Spy()
    values = compat.PerReplica((tf.ones([2]), tf.ones([2])))
    result = ReductionCrossDeviceOps(spy).reduce(
        tf.distribute.ReduceOp.SUM, values, values
    )
    assert result.values[0].numpy().tolist() == [2, 2]
    assert spy.calls == []


def test_training_of_a_stock_strategy():
    strategy = make_strategy(Spy(make_reduction("collective", TOWERS)))
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        def body():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * weight) * replica()
            grad = tape.gradient(loss, weight)
            grad = tf.distribute.get_replica_context().all_reduce("SUM", grad)
            weight.assign_sub(0.01 * grad)

        strategy.run(body)

    for _ in range(3):
        step()
    for value in weight.values:
        np.testing.assert_allclose(
            value, np.array([1.0, 2.0]) * 0.8**3, rtol=1e-6
        )
