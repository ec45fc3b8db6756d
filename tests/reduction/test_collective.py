"""TensorFlow's collective ops: their keys, and what may disturb them."""

import concurrent.futures

import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction import CollectiveAllReduce
from tests.reduction.cases import assert_sums, compiled, cpus, ops_of


def rows(towers, number=3, size=100):
    return [
        [tf.fill([size + i], float(k + i)) for i in range(number)]
        for k in range(towers)
    ]


def on_cpus(towers):
    return compiled(CollectiveAllReduce(cpus(towers)), cpus(towers))


def collectives(ops):
    return [op for op in ops if op.type == "CollectiveReduceV2"]


def test_graphs_have_the_ops_with_all_keys_unlike():
    one = CollectiveAllReduce(cpus(4))
    two = CollectiveAllReduce(cpus(2))
    found = collectives(ops_of(one, rows(4), cpus(4)))
    assert len(found) == 4 * 3
    assert {op.get_attr("communication_hint") for op in found} == {b"ring"}
    groups = {
        int(tf.get_static_value(op.inputs[2]))
        for op in found + collectives(ops_of(two, rows(2), cpus(2)))
    }
    assert len(groups) == 2
    assert min(groups) >= 1_000_000
    # One key tensor for each gradient, shared by the towers.
    assert len({op.inputs[3].name for op in found}) == 3


def test_groups_and_graphs_in_turn():
    steps = {towers: on_cpus(towers) for towers in (4, 2, 3)}
    for _ in range(2):
        for towers, number, size in ((4, 9, 100), (2, 1, 5), (3, 3, 9)):
            grads = rows(towers, number, size)
            assert_sums(steps[towers](grads), grads)
        # Another graph of one group.
        grads = rows(2, 4, 3)
        assert_sums(steps[2](grads), grads)


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


def test_beside_a_stock_strategy_and_made_in_its_scope():
    strategy = tf.distribute.MirroredStrategy(cpus(2))
    with strategy.scope():
        step = on_cpus(3)

    @tf.function
    def stock():
        def replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("sum", tf.ones([2]))

        return strategy.run(replica)

    for _ in range(2):
        assert_sums(step(rows(3)), rows(3))
        assert stock().values[0].numpy().tolist() == [2, 2]


def test_what_the_ops_do_not_know_is_added():
    row = [
        tf.TensorSpec([2], tf.complex64),
        tf.TensorSpec([0, 2], tf.float32),
        tf.TensorSpec([None], tf.float32),
    ]
    ops = ops_of(CollectiveAllReduce(cpus(2)), [row, row], cpus(2))
    assert not collectives(ops)
    assert [op.type for op in ops].count("AddN") == 3


def test_what_is_refused():
    reduce = CollectiveAllReduce(cpus(2))
    with pytest.raises(TowerError, match="was created for"):
        reduce(rows(3), cpus(3))
    full = [f"/job:localhost/replica:0/task:0{name}" for name in cpus(2)]
    assert_sums(reduce(rows(2), full), rows(2))
    with pytest.raises(TowerError, match="'best' is unknown.*'ring'"):
        CollectiveAllReduce(cpus(2), "best")
    with pytest.raises(TowerError, match="/device:CPU:0 and CPU:0 are the"):
        CollectiveAllReduce(["/device:CPU:0", "CPU:0"])
