"""Checks of a worker: the drop-in for BytePS's own module, on two ranks."""

import contextlib
import tempfile

import keras
import numpy as np

import keras_towers.byteps as bps
from keras_towers.dropin.optimizer import reducer_of
from tests.kit.ranks import check
from tests.processes import small as s
from tests.processes.small import RANK, X, Y, model, refused


@check
def the_drop_in_trains_as_one_process():
    """Each rank has other weights, and half of every batch."""
    bps.init()
    mine, alone = (
        s.model(seed=RANK),
        s.eager(optimizer=keras.optimizers.SGD(0.1)),
    )
    optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(0.1))
    mine.compile(optimizer, "mse", metrics=["mae"])
    half = np.arange(48).reshape(-1, 2, 8)[:, RANK].ravel()
    callbacks = [
        bps.callbacks.BroadcastGlobalVariablesCallback(0),
        bps.callbacks.MetricAverageCallback(),
    ]
    s.assert_as_one_process(
        mine,
        lambda it: s.fit(
            it, X[half], Y[half], batch_size=8, callbacks=callbacks
        ),
        alone,
        lambda it: s.fit(it, X[:48], Y[:48], batch_size=16),
        strategy=contextlib.nullcontext(),
    )


@check
def values_of_the_drop_in():
    bps.init()
    assert bps.push_pull(float(RANK), name="mean").numpy() == 0.5
    assert bps.push_pull([RANK, 3], average=False).numpy().tolist() == [1, 6]
    variable = keras.Variable([float("nan"), 1.0] if RANK else [2.0, 3.0])
    bps.broadcast_variables([variable], 0)
    assert variable.numpy().tolist() == [2.0, 3.0]
    with refused("already distributed", "bps.DistributedOptimizer"):
        bps.DistributedOptimizer(bps.DistributedOptimizer(_sgd()))
    with refused("backward_passes_per_step is 0: give 1 or more"):
        bps.DistributedOptimizer(_sgd(), backward_passes_per_step=0)
    with refused("compression is 'fp16', which cannot", "bps.Compression"):
        bps.push_pull(1.0, compression="fp16")
    with refused("bps.broadcast_variables(model.weights"):
        bps.broadcast_global_variables(0)


@check
def a_model_is_loaded_with_its_optimizers_state():
    bps.init()
    mine = s.eager()
    # Keras cannot load "mse" from such a file.
    mine.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.MeanSquaredError(),
        run_eagerly=True,
    )
    mine.train_on_batch(X, Y)
    with tempfile.TemporaryDirectory() as folder:
        mine.save(f"{folder}/model.h5")
        loaded = bps.load_model(f"{folder}/model.h5")
    assert reducer_of(loaded.optimizer) is not None
    for before, after in zip(
        mine.optimizer.variables, loaded.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(before.numpy(), after.numpy())


@check
def a_warm_up_begins_with_the_rate_of_one_rank():
    bps.init()
    mine = model()
    mine.compile(bps.DistributedOptimizer(_sgd()), "mse")
    warm_up = bps.callbacks.LearningRateWarmupCallback(0.4, 2)
    rates = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(
            float(mine.optimizer.learning_rate)
        )
    )
    mine.fit(X, Y, epochs=2, verbose=0, callbacks=[warm_up, note])
    assert 0.2 < rates[0] < 0.4
    np.testing.assert_allclose(rates[-1], 0.4, rtol=1e-5)


def _sgd():
    return keras.optimizers.SGD(0.4)
