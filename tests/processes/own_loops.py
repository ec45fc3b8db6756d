"""Checks of a worker: loops of the user's own, on two ranks."""

import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

from tests.compatibility.replica_calls import assert_calls, values_without_seed
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.ranks import check
from tests.processes import small as s


def loop_as_one_process(strategy):
    """Train by a loop of one's own."""
    with strategy.scope():
        mine = s.model(optimizer="adam")
    data = tf.data.Dataset.from_tensor_slices((s.X, s.Y)).batch(25)
    step = s.own_step(strategy, mine)
    shards = strategy.experimental_distribute_dataset(data)
    losses = [step(batch) for batch in shards]
    alone = s.model(optimizer="adam")
    step = s.own_step(tf.distribute.get_strategy(), alone)
    assert_close(losses, [step(batch) for batch in data], 1e-5)
    s.assert_same_model(mine, alone)


@check
def own_loop_with_shards_within_each_process():
    for options in {"weights": "sharded"}, {"updates": "sharded"}:
        strategy = s.Strategy(towers=2, shard_over="process", **options)
        loop_as_one_process(strategy)


@check
def own_loop():
    strategy = s.Strategy()
    assert (strategy.rank, strategy.size) == (s.RANK, 2)
    assert (strategy.local_rank, strategy.local_size) == (s.RANK, 2)
    assert strategy.is_chief == (s.RANK == 0)
    loop_as_one_process(strategy)
    numbers = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensors(context.input_pipeline_id)
    )
    assert [int(n) for n in numbers] == [s.RANK]
    extended = strategy.extended
    assert extended.should_checkpoint == strategy.is_chief
    assert extended.should_save_summary == strategy.is_chief
    resolver = strategy.cluster_resolver
    assert resolver is None or resolver.task_id == s.RANK


@check
def calls_in_replicas():
    for towers in (1, 2):
        assert_calls(s.Strategy(towers))


@check
def variables_without_a_seed_begin_as_on_rank_0():
    for towers in (1, 2):
        s.assert_equal_on_ranks(values_without_seed(s.Strategy(towers)))
    s.forget_seed()
    with s.Strategy().scope():
        mine = s.model(seed=s.RANK)
    s.own_step(mine.distribute_strategy, mine)((s.X[:25], s.Y[:25]))
    s.assert_same_model(mine)
    with s.Strategy().scope() as strategy:
        mine = [tf.Variable(0.0, name=f"v{k}") for k in range(1 + s.RANK)]
    with s.refused("rank 1 does not have the variables of rank 0", "v1"):
        strategy.run(lambda: mine[0])


def rows_of(distributed, strategy):
    local = map(strategy.experimental_local_results, distributed)
    return [tower.numpy().tolist() for towers in local for tower in towers]


@check
def each_row_of_a_loop_is_read_once():
    strategy, rows = s.Strategy(), tf.data.Dataset.range(8)
    distribute = strategy.experimental_distribute_dataset

    s.forget_seed()
    seeded = rows_of(distribute(rows.shuffle(8, seed=3).batch(4)), strategy)
    assert sorted(sum(sum(s.gather(seeded), []), [])) == [*range(8)]
    unseeded = rows.shuffle(8).batch(4)

    def read():
        return next(iter(distribute(unseeded)))

    for act in (read, tf.function(read)):
        with s.refused("shuffles it without a seed", 'batches="each"'):
            act()
    with s.refused("numbers of batches differ (rank 0: 2, rank 1: 3)"):
        distribute(tf.data.Dataset.range(8 + s.RANK).batch(4))
    with s.refused("have no rows", ".batch(n)"):
        distribute(rows)
    each = s.Strategy(batches="each")
    own = rows.shard(2, s.RANK).shuffle(8).batch(2)
    found = rows_of(each.experimental_distribute_dataset(own), each)
    assert {n % 2 for batch in found for n in batch} == {s.RANK}
    other = rows.shuffle(8).shard(2, s.RANK).batch(2)
    with s.refused("before `shard`, every rank shuffles it without a seed"):
        strategy.distribute_datasets_from_function(lambda context: other)
    with each, s.refused("before `shard`"):
        s.eager().fit(other.map(lambda n: (tf.ones([2, 4]), tf.ones([2, 3]))))


@check
def sums_of_a_loop():
    """Of equal tensors, of which TensorFlow makes one, and of slices."""
    strategy = s.Strategy()
    slices = tf.IndexedSlices(tf.ones(2), tf.constant([0, 2]), tf.constant([4]))
    with strategy.scope():
        x, y = tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros(2))
        z = tf.Variable(tf.zeros(4), aggregation=tf.VariableAggregation.SUM)
        sgd = keras.optimizers.SGD(1.0)

    @tf.function
    def step():
        def on_replica():
            r = tf.constant(float(s.RANK))
            sgd.apply([tf.fill([2], r), tf.fill([2], 2 * r)], [x, y])
            z.scatter_add(slices)
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", {"x": r, "y": r * 2})

        return strategy.run(on_replica)

    assert_all_close([*step().values(), x, y], [1, 2, [-1, -1], [-2, -2]])
    assert_all_close([z], [[2, 0, 2, 0]])
    found = strategy.reduce("SUM", strategy.run(lambda: slices), axis=None)
    assert isinstance(found, tf.IndexedSlices)
    assert_all_close([tf.convert_to_tensor(found)], [[2, 0, 2, 0]])


@check
def a_checkpoint_has_what_ranks_sum_when_they_read_it():
    strategy = s.Strategy()
    with strategy.scope():
        total = tf.Variable(
            1.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            trainable=False,
        )
    strategy.run(lambda: total.assign(1.0 + s.RANK))
    checkpoint = tf.train.Checkpoint(total=total)
    path = checkpoint.save(pathlib.Path(sys.argv[1]) / "summed" / "c")
    s.gather("saved")
    (name,) = (n for n, _ in tf.train.list_variables(path) if "total" in n)
    assert tf.train.load_variable(path, name) == 3
    # As TensorFlow does, each gets its part of the sum.
    checkpoint.restore(path)
    np.testing.assert_equal(strategy.run(total.read_value).numpy(), 1.5)


@check
def a_handler_that_knows_no_ranks_is_refused():
    handler = tf.distribute.experimental.PreemptionCheckpointHandler
    folder = str(pathlib.Path(sys.argv[1]) / "preempted")
    checkpoint = tf.train.Checkpoint()
    with s.Strategy(), s.refused("PreemptionCheckpointHandler", "kt.Backup"):
        handler(None, checkpoint, folder)
