"""Checks of a worker: ``keras.distribution`` on two ranks."""

import contextlib

import keras
import tensorflow as tf

from keras_towers.strategies import keras_distribution as jobs
from keras_towers.transport import SingleProcess
from tests.kit.ranks import check
from tests.processes import mesh, small as s


@contextlib.contextmanager
def initialized():
    keras.distribution.initialize()
    try:
        yield
    finally:
        # No other check is to be in a job that it did not join.
        jobs._job = SingleProcess()


@check
def initialize_joins_the_job():
    with initialized():
        number = 2 * len(tf.config.list_logical_devices("CPU"))
        devices = keras.distribution.list_devices()
        assert devices == [f"cpu:{index}" for index in range(number)]
        distribution = keras.distribution.DataParallel()
        assert distribution.num_processes == 2
        assert distribution.num_model_replicas == number
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
        devices = keras.distribution.list_devices()
        distribution = keras.distribution.DataParallel(
            devices=devices[:: len(devices) // 2], auto_shard_dataset=False
        )
        s.assert_as_one_process(
            s.eager(seed=s.RANK),
            lambda mine: s.fit(mine, own, None),
            reference=lambda it: s.fit(it, *both, batch_size=50),
            strategy=distribution.scope(),
        )


@check
def a_mesh_of_the_devices_of_all_processes():
    """A row that spans processes is refused."""
    mine, reference = mesh.build(), mesh.build()
    with initialized():
        devices = keras.distribution.list_devices()
        layouts = mesh.layout_map(mesh.WITH_BATCH, 4, 2, devices)
        distribution = keras.distribution.ModelParallel(layout_map=layouts)
        with distribution.scope():
            mesh.fit(mine)
        if s.RANK == 0:
            mesh.fit(reference)
        s.assert_same_model(mine, reference)
        wrong = mesh.layout_map(rows=1, columns=8, names=devices)
        distribution = keras.distribution.ModelParallel(layout_map=wrong)
        with s.refused("2 processes cannot share"), distribution.scope():
            mesh.fit(mesh.build())
