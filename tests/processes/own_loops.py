"""Checks of a worker: loops of the user's own, on two ranks."""

import tensorflow as tf

from tests.compatibility.replica_calls import assert_calls, values_without_seed
from tests.kit.compare import assert_close
from tests.kit.ranks import check, rare_check
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
    options = {"towers": 2, "shard_over": "process"}
    loop_as_one_process(s.Strategy(weights="sharded", **options))


@rare_check
def own_loop_with_slots_in_shards_within_each_process():
    options = {"towers": 2, "shard_over": "process"}
    loop_as_one_process(s.Strategy(updates="sharded", **options))


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
