"""Checks of the rows on TensorFlow 1, keras.distribution and Accelerate."""

import inspect
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.docs.migration import (
    DEVICES,
    X,
    Y,
    differ,
    fit,
    model,
    row,
    served,
)
from tests.docs.test_commands import check

REPLICAS = "From TensorFlow 1's SyncReplicasOptimizer"
JAX = "From keras.distribution on JAX"
ACCELERATE = "From Accelerate"
STOCK = tf.compat.v1.train.SyncReplicasOptimizer
ARGUMENTS = list(inspect.signature(STOCK.__init__).parameters)[1:]
OWN = inspect.signature(kt.SyncReplicasStrategy).parameters


@row(REPLICAS, "`opt`")
def optimizer(row):
    """The average of two batches is clipped once."""

    def make():
        clipped = keras.optimizers.SGD(0.5, global_clipnorm=0.1)
        return model(optimizer=clipped, run_eagerly=False)

    mine = make()
    with kt.SyncReplicasStrategy(total_num_replicas=2):
        mine.fit(X[:32], Y[:32], 8, shuffle=False, verbose=0)
    alone = make()
    alone.fit(X[:32], Y[:32], 16, shuffle=False, verbose=0)
    assert differ(mine, alone) < 1e-6


@row(REPLICAS, "`replicas_to_aggregate`")
def aggregated(row):
    assert kt.SyncReplicasStrategy(towers=3).replicas_to_aggregate == 3
    strategy = kt.SyncReplicasStrategy(**{row.here[0]: 2}, towers=3)
    assert strategy.replicas_to_aggregate == 2


@row(REPLICAS, "`total_num_replicas`")
def replicas(row):
    strategy = kt.SyncReplicasStrategy(**{row.here[0]: 3})
    assert strategy.total_num_replicas == 3
    with (
        pytest.raises(kt.TowerError, match="total_num_replicas=2"),
        served(lambda: kt.SyncReplicasStrategy(total_num_replicas=2)),
    ):
        pass


@row(REPLICAS, "`variable_averages`")
def averages(row):
    moving = tf.train.ExponentialMovingAverage(0.5)
    mine = model(run_eagerly=False)
    with kt.SyncReplicasStrategy(**{row.here[0]: moving}, towers=2) as strategy:
        fit(mine)
        for variable in mine.trainable_variables:
            found = row.made(1, strategy=strategy, variable=variable)
            assert found.shape == variable.shape


@row(REPLICAS, "`variables_to_average`")
def averaged(row):
    assert "variables_to_average" in ARGUMENTS
    assert "variables_to_average" not in OWN


@row(REPLICAS, "`use_locking`")
def locking(row):
    assert "use_locking" in ARGUMENTS and "use_locking" not in OWN


@row(REPLICAS, "`name`")
def name(row):
    assert "name" in ARGUMENTS and "name" not in OWN


@row(REPLICAS, "`compute_gradients`, `apply_gradients`, `minimize`")
def methods(row):
    assert row.here == ("fit",)
    assert hasattr(STOCK, "compute_gradients")


@row(
    REPLICAS,
    "`make_session_run_hook(is_chief, num_tokens)`, "
    "`get_chief_queue_runner`, `get_init_tokens_op`",
)
def tokens(row):
    strategy = kt.SyncReplicasStrategy(towers=2)
    assert strategy.tokens == row.here[1].strip('"')
    given = eval(f"dict({row.here[0]})")
    assert kt.SyncReplicasStrategy(**given, towers=2).tokens == "shared"


@row(REPLICAS, "`global_step`")
def global_step(row):
    mine = model(run_eagerly=False)
    with kt.SyncReplicasStrategy(towers=2):
        mine.fit(X[:32], Y[:32], 8, verbose=0)
    assert row.made(optimizer=mine.optimizer) == 2


@row(REPLICAS, "stale gradients are dropped in silence")
def dropped(row):
    mine = model(run_eagerly=False)
    options = {"replicas_to_aggregate": 1, "total_num_replicas": 2}
    with kt.SyncReplicasStrategy(**options) as strategy:
        history = fit(mine).history.history
    assert "dropped_gradients" in history
    assert "dropped" in str(row.made(strategy=strategy))


@row(REPLICAS, "the mean of R batches, each of its own data")
def data(row):
    with served(kt.SyncReplicasStrategy) as strategy:
        assert strategy.batches == "split"
    with served(
        lambda: eval(f"kt.SyncReplicasStrategy({row.here[0]})", {"kt": kt})
    ) as strategy:
        assert strategy.batches == "each"


def set_for(**options):
    return keras.distribution.DataParallel(**options)


@row(JAX, "`DataParallel()`, `devices=`, `device_mesh=`", long=True)
def data_parallel(row):
    mine = model()
    with set_for(devices=["cpu:0", "cpu:1"]).scope():
        fit(mine)
        assert len(mine.weights[0]._value.values) == 2
    keras.distribution.set_distribution(None)
    assert differ(mine, fit(model())) < 1e-6


@row(JAX, "`with distribution.scope():`")
def distribution_scope(row):
    with set_for(devices=["cpu:0", "cpu:1"]).scope():
        assert keras.distribution.distribution() is not None
    assert keras.distribution.distribution() is None


@row(JAX, "`list_devices()`")
def devices(row):
    found = keras.distribution.list_devices()
    assert len(found) == len(tf.config.list_logical_devices("CPU"))


@row(JAX, "`initialize(job_addresses, num_processes, process_id)`")
def initialize(row):
    keras.distribution.initialize()
    with pytest.raises(kt.TowerError, match="num_processes=2, but no launcher"):
        keras.distribution.initialize(num_processes=2)


@row(JAX, "`auto_shard_dataset=True`")
def sharded(row):
    assert set_for(devices=["cpu:0"]).auto_shard_dataset is True


@row(JAX, "`auto_shard_dataset=False`")
def not_sharded(row):
    mine = model()
    one = set_for(devices=["cpu:0"], auto_shard_dataset=False)
    with one.scope():
        fit(mine)
    assert differ(mine, fit(model())) < 1e-6


@row(JAX, "BatchNormalization and Dropout work on the global batch", long=True)
def coupled(row):
    def make():
        return model(keras.layers.BatchNormalization())

    mine, exact, alone = make(), make(), fit(make())
    with set_for(devices=["cpu:0", "cpu:1"]).scope():
        fit(mine)
    keras.distribution.set_distribution(None)
    assert differ(mine, alone) > 1e-5
    with row.made():
        fit(exact)
    assert differ(exact, alone) < 1e-5


@row(JAX, "`ModelParallel`, `LayoutMap`")
def model_parallel(row):
    mesh = keras.distribution.DeviceMesh(
        (1, 2), ["batch", "model"], ["cpu:0", "cpu:1"]
    )
    distribution = keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(mesh)
    )
    with pytest.raises(kt.TowerError, match="ModelParallel"):
        keras.distribution.set_distribution(distribution)


@row(ACCELERATE, "`Accelerator()`, `prepare(model, optimizer, loader)`")
def block(row):
    made = eval(row.here[0].removeprefix("with ").rstrip(":"), {"kt": kt})
    assert made.num_towers > 1


@row(ACCELERATE, "`accelerate launch --num_processes 4 train.py`")
def launch(row):
    check(row.here[0].split()[1:])


@row(ACCELERATE, "`accelerate env`, `accelerate test`")
def doctor(row):
    for line in row.here:
        check(line.split()[1:])


class Asks(keras.Model):
    """Notes what it can ask for in a step, and clips by hand."""

    def __init__(self, code):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.code = code

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y, _ = data
        rows = tf.shape(self.code(x=x))[0]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        grads, _ = kt.clip_by_global_norm(tape.gradient(loss, weights), 0.1)
        self.optimizer.apply(grads, weights)
        return {"loss": loss, "rows": tf.cast(rows, tf.float32)}


@row(ACCELERATE, "`accelerator.gather(x)`")
def gather(row):
    mine = Asks(lambda x: row.made(x=x))
    mine.compile("sgd", run_eagerly=True)
    with kt.TowerStrategy(DEVICES):
        logs = mine.train_on_batch(X[:16], Y[:16], return_dict=True)
    assert logs["rows"] == 16


@row(ACCELERATE, "`accelerator.clip_grad_norm_`")
def clip(row):
    *names, step, code = row.here
    assert hasattr(Asks, step)
    grads, norm = eval(code, {"kt": kt})([tf.ones(4)], 1.0)
    assert np.isclose(norm, 2.0) and np.allclose(grads[0], 0.5)
    for name in names:
        assert keras.optimizers.SGD(**{name: 1.0})


@row(ACCELERATE, "`gradient_accumulation_steps=4`", long=True)
def accumulation(row):
    given = eval(f"dict({row.there.strip('`')})")
    optimizers = [keras.optimizers.SGD(**given) for _ in range(2)]
    mine, alone = (model(optimizer=optimizer) for optimizer in optimizers)
    with kt.TowerStrategy(DEVICES):
        fit(mine, epochs=2)
    assert differ(mine, fit(alone, epochs=2)) < 1e-6


@row(ACCELERATE, '`mixed_precision="bf16"`')
def precision(row):
    eval(row.here[0], {"keras": keras})
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    assert policy.compute_dtype == "bfloat16"


@row(ACCELERATE, "`accelerator.is_main_process`")
def main(row):
    assert row.made(strategy=kt.TowerStrategy(DEVICES)) is True


@row(ACCELERATE, "`accelerator.process_index`, `num_processes`")
def place(row):
    strategy = kt.TowerStrategy(DEVICES)
    assert [row.made(n, strategy=strategy) for n in (0, 1)] == [0, 1]


@row(ACCELERATE, "`split_batches=True` / `False`")
def split(row):
    assert kt.TowerStrategy(DEVICES).batches == "split"
    for value in (row.here[0].partition("=")[2], row.here[1]):
        made = kt.TowerStrategy(DEVICES, batches=json.loads(value))
        assert made.batches == json.loads(value)


@row(ACCELERATE, "`even_batches=True` (repeats examples)", long=True)
def uneven(row):
    mine = model()
    with kt.TowerStrategy(3):
        fit(mine)
    assert differ(mine, fit(model())) < 1e-6


@row(ACCELERATE, "`notebook_launcher(train, args, num_processes=2)`")
def notebook(row):
    named = {"np", "args"}
    assert named <= inspect.signature(kt.launch).parameters.keys()


@row(ACCELERATE, "`find_executable_batch_size`, FSDP, DeepSpeed")
def missing(row):
    assert row.here == ()
