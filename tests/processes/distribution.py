"""Checks of a worker: ``keras.distribution`` on two ranks."""

import contextlib

import keras
import tensorflow as tf

from keras_towers import jobs
from tests.kit.ranks import check
from tests.processes.small import (
    COUNT,
    RANK,
    SHORT,
    X,
    Y,
    assert_same_history,
    assert_same_model,
    model,
    refused,
)


@contextlib.contextmanager
def initialized():
    keras.distribution.initialize()
    try:
        yield
    finally:
        # No other check is to be in a job that it did not join.
        jobs._job = None


def as_one_process(mine, data):
    """Train under a ``DataParallel``, and compare with one process."""
    reference = model(seed=0)
    wanted = reference.fit(*data, shuffle=False, verbose=0, epochs=2)
    with keras.distribution.DataParallel().scope():
        found = mine.fit(*data, shuffle=False, verbose=0, epochs=2)
    assert_same_history(found, wanted)
    assert_same_model(mine, reference)


@check
def a_job_has_to_be_joined():
    mine = model()
    with keras.distribution.DataParallel().scope(), refused("initialize()"):
        mine.fit(X, Y, verbose=0)


@check
def initialize_joins_the_job():
    with initialized():
        assert keras.distribution.list_devices() == ["cpu:0", "cpu:1"]
        distribution = keras.distribution.DataParallel()
        assert distribution.num_processes == 2
        assert distribution.num_model_replicas == 2
        assert distribution.data_shard_id == RANK
    with refused("num_processes=3", "made it 2"):
        keras.distribution.initialize(num_processes=3)


@check
def distribution_of_arrays():
    with initialized():
        as_one_process(model(seed=RANK), (X, Y))


@check
def distribution_of_a_dataset_that_does_not_divide():
    data = tf.data.Dataset.from_tensor_slices((X[:SHORT], Y[:SHORT])).batch(7)
    with initialized():
        as_one_process(model(seed=RANK), (data,))


@check
def distribution_with_own_data_of_each_rank():
    """``auto_shard_dataset=False``: the ranks' batches are one together."""
    half = COUNT // 2
    mine = model(seed=RANK)
    part = slice(RANK * half, (RANK + 1) * half)
    data = tf.data.Dataset.from_tensor_slices((X[part], Y[part])).batch(half)
    with initialized():
        distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
        with distribution.scope():
            mine.fit(data, epochs=2, verbose=0)
    reference = model(seed=0)
    reference.fit(X, Y, epochs=2, batch_size=COUNT, shuffle=False, verbose=0)
    assert_same_model(mine, reference)
