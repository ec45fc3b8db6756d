"""Checks of the rows on tensorpack's trainers."""

import functools
import inspect
import re
import unittest

import keras
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
    option,
    row,
    served,
)

HERE = "From tensorpack"


def with_value(row, text, value):
    """The code of a row, with a value in place of its dots."""
    (code,) = [code for code in row.here if text in code]
    return eval(
        code.replace("...", repr(value)),
        {"kt": kt, "gpus": DEVICES, "towers": 1},
    )


@row(HERE, "`SimpleTrainer()`")
def simple(row):
    assert row.here == ("fit",)


@row(HERE, "`QueueInputTrainer()`", long=True)
def queue_input(row):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).prefetch(2)
    mine = model()
    with kt.TowerStrategy(DEVICES):
        mine.fit(data, verbose=0)
    assert differ(mine, fit(model())) < 1e-6


@row(HERE, "`SyncMultiGPUTrainer(gpus)`")
def short_name(row):
    mine = model()
    with row.made() as strategy:
        fit(mine)
        assert "weights are on the host" in strategy.describe()
    assert differ(mine, fit(model())) < 1e-6


@row(HERE, "`SyncMultiGPUTrainerReplicated(gpus, average=True, mode=...)`")
def replicated(row):
    for mode in ("hierarchical", "cpu", "gpu"):
        assert with_value(row, "mode=", mode).mode == mode
    mine = model(keras.layers.BatchNormalization(momentum=0.0))
    with kt.TowerStrategy(DEVICES):
        mine.fit(X[:16], Y[:16], 16, shuffle=False, verbose=0)
    means = [X[:8].mean(axis=0), X[8:16].mean(axis=0)]
    moving = mine.layers[0].moving_mean.numpy()
    assert abs(moving - sum(means) / 2).max() < 1e-6


@row(HERE, "`average=False`")
def sums(row):
    mine, alone = model(run_eagerly=False), fit(model())
    told = unittest.TestCase().assertLogs("keras_towers", "WARNING")
    with told as logged, row.made() as strategy:
        assert strategy.average is False
        fit(mine)
    assert "mean over the examples, not their sum" in logged.output[0]
    assert differ(mine, alone) > 1e-3


@row(HERE, "`BROADCAST_EVERY_EPOCH = False`")
def every_epoch(row):
    assert row.made().sync_every_epoch is False
    assert kt.TowerStrategy(DEVICES).sync_every_epoch is True


@row(HERE, "`SyncMultiGPUTrainerParameterServer(gpus, ps_device=...)`")
def parameter_server(row):
    for where in ("cpu", "gpu"):
        assert with_value(row, "ps_device=", where).ps_device == where
    assert kt.ParameterServerTowerStrategy(2).ps_device == "gpu"
    assert kt.ParameterServerTowerStrategy(3).ps_device == "cpu"


@row(HERE, "`AsyncMultiGPUTrainer(gpus, scale_gradient=...)`")
def asynchronous(row):
    mine = model(run_eagerly=False)
    with with_value(row, "scale_gradient=", False) as strategy:
        assert strategy.scale_gradient is False
        mine.fit(X, Y, 4, steps_per_epoch=10, verbose=0)
    assert mine.optimizer.iterations == 10


@row(
    HERE,
    "`DistributedTrainerParameterServer(gpus, server, caching_device=...)`",
)
def distributed_parameter_server(row):
    for where in ("cpu", "gpu"):
        make = functools.partial(with_value, row, "caching", where)
        with served(make) as strategy:
            assert strategy.caching_device == where
            assert "scaled by 1/1" in strategy.describe()


@row(HERE, "`DistributedTrainerReplicated(gpus, server)`")
def distributed_replicated(row):
    with served(lambda: with_value(row, "Replicated", 0)) as strategy:
        assert strategy.num_towers == 1
        assert "scaled by 1/1" in strategy.describe()


@row(
    HERE,
    "`HorovodTrainer(average=..., compression=hvd.Compression.fp16)`",
)
def horovod(row):
    pytest.importorskip("horovod")
    strategy = with_value(row, "Horovod", False)
    assert strategy.average is False
    assert option(strategy, "compression") == "fp16"
    assert strategy.batches == "split"


@row(HERE, "`BytePSTrainer(average=...)`")
def byteps(row):
    # A job of it is where the page's script for BytePS runs.
    options = inspect.signature(kt.BytePSStrategy).parameters
    assert set(re.findall(r"(\w+)=", row.here[0])) <= options.keys()


@row(HERE, "`NoOpTrainer()`")
def no_op(row):
    mine, before, epochs = model(), model(), []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: epochs.append(epoch)
    )
    with row.made():
        mine.fit(epochs=3, steps_per_epoch=2, verbose=0, callbacks=[note])
    assert epochs == [0, 1, 2]
    assert differ(mine, before) == 0


@row(
    HERE,
    "`get_current_tower_context()`: `.index`, `.total`, "
    "`.is_main_training_tower`",
)
def context(row):
    tower = row.made()
    for words in row.here[1:]:
        for word in words.split(" and "):
            assert hasattr(tower, word.strip("."))


@row(HERE, "`TowerFunc`, `TowerContext`")
def functions(row):
    seen = []

    def note():
        seen.append(kt.current_tower().index)

    with kt.TowerStrategy(DEVICES):
        row.made(fn=note)
    assert sorted(seen) == [0, 1]


@row(HERE, "`GradientPacker(num_split)`")
def packer(row):
    assert row.made()(num_split=2)


@row(HERE, "`steps_per_epoch`, `max_epoch`, `starting_epoch`")
def epochs(row):
    accepted = inspect.signature(keras.Model.fit).parameters
    assert set(re.findall(r"(\w+)=", row.here[0])) <= accepted.keys()


@row(HERE, "`trainer.is_chief`, `Callback.set_chief_only(False)`")
def chief(row):
    assert row.made(strategy=kt.TowerStrategy(DEVICES)) is True
    assert row.made(1, callback=keras.callbacks.Callback())
