"""Checks of the rows on ``tf.distribute``."""

import contextlib
import functools
import json
import os
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.meeting.environments import tf_config
from keras_towers.placement import LeastLoadedPlacement
from tests.docs.migration import (
    DEVICES,
    X,
    Y,
    differ,
    fit,
    model,
    option,
    row,
    scripts,
    served,
)

HERE = "From tf.distribute"


def task(role, index, **jobs):
    """Make this process a task."""
    config = {"cluster": jobs, "task": {"type": role, "index": index}}
    return mock.patch.dict(os.environ, TF_CONFIG=json.dumps(config))


def alone():
    return task("worker", 0, worker=["localhost:1"])


@row(HERE, "`MirroredStrategy(devices)`")
def names_of_devices(row):
    stock = tf.distribute.MirroredStrategy(DEVICES)
    assert row.made().extended.worker_devices == stock.extended.worker_devices


@row(HERE, "`MirroredStrategy()`")
def default_devices(row):
    stock = tf.distribute.MirroredStrategy()
    assert row.made().num_towers == stock.num_replicas_in_sync > 1


@row(HERE, "`with strategy.scope():` around the model")
def scope(row):
    with kt.TowerStrategy(DEVICES).scope():
        mine = model()
    assert differ(fit(mine), fit(model())) < 1e-6
    assert len(mine.weights[0]._value.values) == 2


@row(HERE, "`cross_device_ops=NcclAllReduce()`")
def nccl(row):
    assert option(row.made(), "mode") == "nccl"


@row(HERE, "`cross_device_ops=HierarchicalCopyAllReduce()`")
def hierarchical(row):
    assert row.made().mode == "hierarchical"


@row(HERE, "`cross_device_ops=ReductionToOneDevice()`")
def to_one_device(row):
    assert [row.made(index).mode for index in (0, 1)] == ["cpu", "gpu"]


@row(
    HERE,
    "`strategy.run`, `reduce`, `gather`, `experimental_distribute_dataset`",
    long=True,
)
def custom_loops(row):
    data = tf.data.Dataset.from_tensor_slices(X[:16]).batch(8)

    def use(strategy):
        found = []
        for batch in strategy.experimental_distribute_dataset(data):
            per_replica = strategy.run(lambda it: it * 2, (batch,))
            found.append(strategy.gather(per_replica, axis=0))
            found.append(strategy.reduce("SUM", per_replica, axis=0))
        return [part.numpy() for part in found]

    wanted = use(tf.distribute.MirroredStrategy(DEVICES))
    for mine, theirs in zip(
        use(kt.TowerStrategy(DEVICES)), wanted, strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


class Scaled(keras.Model):
    """A ``train_step`` that divides its loss as was needed."""

    def __init__(self, divides):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.divides = divides

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            if self.divides:
                replicas = tf.distribute.get_strategy().num_replicas_in_sync
                loss /= replicas
                self.replicas = replicas
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@row(HERE, "`num_replicas_in_sync`")
def number_of_replicas(row):
    strategy = kt.TowerStrategy(DEVICES)
    assert strategy.num_replicas_in_sync == 2
    mine = Scaled(True)
    mine.compile("sgd", run_eagerly=True)
    with strategy:
        fit(mine)
    assert mine.replicas == 1


@row(
    HERE,
    "loss scaling by `1 / num_replicas_in_sync` in a `train_step`",
    long=True,
)
def loss_scaling(row):
    trained = []
    for block in (contextlib.nullcontext(), kt.TowerStrategy(DEVICES)):
        keras.utils.set_random_seed(1)
        mine = Scaled(False)
        mine(X)
        mine.compile("sgd", run_eagerly=True)
        with block:
            fit(mine)
        trained.append(mine)
    assert differ(*trained) < 1e-6


@row(HERE, "`drop_remainder=True`, batch sizes that divide")
def uneven_batches(row):
    assert len(X) % 15 and 15 % 2
    mine = model()
    with kt.TowerStrategy(DEVICES):
        fit(mine, batch_size=15)
    assert differ(mine, fit(model(), batch_size=15)) < 1e-6


def _train_as_on_one_device_but_for(layer, equal, different):
    mine, other, alone = (model(layer()) for _ in range(3))
    with equal:
        fit(mine)
    fit(alone)
    assert differ(mine, alone) < 1e-5
    with different:
        fit(other)
    assert differ(other, alone) > 1e-3


@row(HERE, "BatchNormalization on each replica's share", long=True)
def batch_normalization(row):
    made, default = row.made(1), kt.TowerStrategy(DEVICES)
    layer = keras.layers.BatchNormalization
    _train_as_on_one_device_but_for(layer, made, default)


@row(HERE, "Dropout draws on each replica by itself", long=True)
def dropout(row):
    made, default = row.made(), kt.TowerStrategy(DEVICES)
    layer = functools.partial(keras.layers.Dropout, 0.5, seed=1)
    _train_as_on_one_device_but_for(layer, default, made)


@row(HERE, '`OneDeviceStrategy("/cpu:1")`')
def one_device(row):
    with row.made():
        mine = model()
        fit(mine)
        assert mine.weights[0].value.device.endswith("CPU:1")


@row(HERE, "`CentralStorageStrategy()`", long=True)
def central_storage(row):
    mine = model()
    with row.made() as strategy:
        fit(mine)
        assert "weights are on the host" in strategy.describe()
    assert differ(mine, fit(model())) < 1e-6


@row(HERE, "`TPUStrategy`")
def no_tpu(row):
    assert row.here == ()
    assert not [name for name in kt.__all__ if "TPU" in name]


@row(HERE, "`MultiWorkerMirroredStrategy()`")
def several_workers(row):
    with alone(), row.made() as strategy:
        assert (strategy.rank, strategy.size) == (0, 1)
        fit(model())


@row(HERE, "`communication_options=CommunicationOptions(implementation=...)`")
def communication(row):
    name, value = row.here[0].split("=")
    with alone():
        strategy = kt.MultiWorkerTowerStrategy(**{name: eval(value)})
    assert option(strategy, "compression") == "none"


@row(HERE, "`dataset.shard`, `AutoShardPolicy`")
def sharded_data(row):
    with alone():
        assert option(row.made(), "batches") == "each"
        assert option(kt.MultiWorkerTowerStrategy(), "batches") == "split"


@row(HERE, "`ParameterServerStrategy(resolver)`")
def parameter_servers(row):
    with served(row.made) as strategy:
        assert strategy.sync is False
        assert "no worker waits" in strategy.describe()
    with served(kt.DistributedParameterServerStrategy) as strategy:
        assert strategy.sync is True


@row(HERE, "`ClusterCoordinator(strategy).schedule(step)`")
def loops_of_ones_own(row):
    with (
        served(kt.DistributedParameterServerStrategy) as strategy,
        strategy,
        pytest.raises(kt.TowerError, match=r"trains by fit\(\) only"),
    ):
        model().train_on_batch(X[:8], Y[:8])


@row(HERE, "`variable_partitioner=...`")
def whole_variables(row):
    sizes = [6, 5, 4, 1]
    place = LeastLoadedPlacement(["/cpu:0", "/cpu:1"])
    where = [place(f"v{n}", (n,), "float32") for n in sizes]
    assert where == ["/cpu:0", "/cpu:1", "/cpu:1", "/cpu:0"]


@row(HERE, 'a `"chief"` in `TF_CONFIG`')
def chief(row):
    jobs = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    with task("chief", 0, **jobs):
        cluster = tf_config.required()
        assert (cluster.rank, cluster.size, cluster.trains) == (0, 2, True)


@row(HERE, '`"worker"`')
def worker(row):
    with task("worker", 0, worker=["a:1", "b:1"]):
        assert tf_config.required().rank == 0
    with task("worker", 0, worker=["a:1"], chief=["b:1"]):
        assert tf_config.required().rank == 1


@row(HERE, '`"evaluator"`')
def evaluator(row):
    jobs = {"worker": ["a:1", "b:1"], "evaluator": ["c:1"], "ps": ["d:1"]}
    with task("evaluator", 0, **jobs):
        for name in ("multi-worker", "distributed-parameter-server"):
            with pytest.raises(kt.TowerError, match="evaluator"):
                kt.strategy(name)


@row(HERE, '`"ps"`')
def parameter_server(row):
    jobs = {"worker": ["a:1"], "ps": ["b:1"]}
    with task("ps", 0, **jobs):
        assert not tf_config.required().trains
    # That it serves, and ends well, is seen where the page's script runs.
    assert "DistributedParameterServerStrategy(sync=False)" in scripts()
