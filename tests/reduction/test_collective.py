"""TensorFlow's collective ops: their keys, and what may disturb them."""

import concurrent.futures

import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction import CollectiveAllReduce
from tests.reduction.cases import assert_sums, compiled, cpus


def rows(towers, number=3, size=100):
    return [
        [tf.fill([size + i], float(k + i)) for i in range(number)]
        for k in range(towers)
    ]


def on_cpus(towers):
    return compiled(CollectiveAllReduce(cpus(towers)), cpus(towers))


def test_groups_and_graphs_in_turn_also_of_a_stock_strategy():
    stock = tf.distribute.MirroredStrategy(cpus(2))
    steps = {towers: on_cpus(towers) for towers in (4, 2)}
    with stock.scope():
        steps[3] = on_cpus(3)

    @tf.function
    def of_stock():
        def replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("sum", tf.ones([2]))

        return stock.run(replica)

    for _ in range(2):
        # The last one is another graph of one group.
        for given in ((4, 9, 100), (2, 1, 5), (3, 3, 9), (2, 4, 3)):
            grads = rows(*given)
            assert_sums(steps[len(grads)](grads), grads)
            assert of_stock().values[0].numpy().tolist() == [2, 2]


def test_inside_a_loop_and_a_condition():
    reduce = CollectiveAllReduce(cpus(2))

    @tf.function
    def step(grads, times):
        for turn in tf.range(times):
            if turn % 2 == 0:
                grads = reduce(grads, cpus(2))
        return grads[1][0][0]

    grads = [[tf.ones([4])], [tf.ones([4])]]
    assert step(grads, tf.constant(40)).numpy() == 2.0**20


def test_two_threads_run_one_graph():
    step = on_cpus(4)
    grads = rows(4, number=8)
    step(grads)

    def work(_):
        for _ in range(20):
            assert_sums(step(grads), grads)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert len([*pool.map(work, range(2), timeout=60)]) == 2


def test_steps_after_one_that_failed():
    reduce = CollectiveAllReduce(cpus(4))

    @tf.function
    def step(grads, fail):
        grads = [list(row) for row in grads]
        with tf.device("/device:CPU:1"):
            check = tf.debugging.Assert(tf.logical_not(fail), ["tower 1"])
            with tf.control_dependencies([check]):
                grads[1][1] = tf.identity(grads[1][1])
        return reduce(grads, cpus(4))

    # TensorFlow may give up all collectives of a process for good where the
    # first step, in which the towers find one another, is the one that fails.
    step(rows(4), tf.constant(False))
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(rows(4), tf.constant(True))
        for _ in range(20):
            results = step(rows(4), tf.constant(False))
        assert_sums(results, rows(4))


def test_what_is_refused():
    reduce = CollectiveAllReduce(cpus(2))
    with pytest.raises(TowerError, match="was created for"):
        reduce(rows(3), cpus(3))
    full = [f"/job:localhost/replica:0/task:0{name}" for name in cpus(2)]
    assert_sums(reduce(rows(2), full), rows(2))
