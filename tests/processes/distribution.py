"""Checks of a worker: ``keras.distribution`` on two ranks."""

import contextlib

import keras
import tensorflow as tf

from keras_towers.strategies import keras_distribution as jobs
from tests.kit.ranks import check
from tests.processes import small as s


@contextlib.contextmanager
def initialized():
    keras.distribution.initialize()
    try:
        yield
    finally:
        # No other check is to be in a job that it did not join.
        jobs._job = None


@check
def initialize_joins_the_job():
    with initialized():
        assert keras.distribution.list_devices() == ["cpu:0", "cpu:1"]
        distribution = keras.distribution.DataParallel()
        assert distribution.num_processes == 2
        assert distribution.num_model_replicas == 2
        assert distribution.data_shard_id == s.RANK
    with s.refused("num_processes=3", "made it 2"):
        keras.distribution.initialize(num_processes=3)


@check
def distribution_of_a_dataset_that_does_not_divide():
    data = tf.data.Dataset.from_tensor_slices((s.X, s.Y))
    data = data.take(s.SHORT).batch(7)
    with initialized():
        s.assert_as_one_process(
            s.eager(seed=s.RANK),
            lambda mine: s.fit(mine, data, None),
            strategy=keras.distribution.DataParallel().scope(),
        )


@check
def distribution_with_own_data_of_each_rank():
    """``auto_shard_dataset=False``: the ranks' batches are one together."""
    data = tf.data.Dataset.from_tensor_slices((s.X, s.Y))
    own = data.shard(2, s.RANK).batch(25)
    both = [tf.concat([a[0::2], a[1::2]], 0) for a in (s.X, s.Y)]
    with initialized():
        distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
        s.assert_as_one_process(
            s.eager(seed=s.RANK),
            lambda mine: s.fit(mine, own, None),
            reference=lambda it: s.fit(it, *both, batch_size=50),
            strategy=distribution.scope(),
        )
