"""Cases of two processes: callbacks, files, functions and refusals."""

import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf
from common import (
    GLOBAL_BATCH,
    case,
    data,
    gradients,
    loss,
    message,
    mine,
    model,
    outcome,
    ranks_apart,
    sgd,
    train,
    trained_alone,
    weights_apart,
)

import keras_towers as kt
import keras_towers.horovod as hvd


def _unbuilt(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.0),
            keras.layers.Dense(3),
        ]
    )


def _broadcast(make, **kwargs):
    """Train with ranks that start apart; compare with rank 0 alone."""
    found = []
    for seed in (0, hvd.rank()):
        made = make(seed)
        optimizer = sgd() if not found else hvd.DistributedOptimizer(sgd())
        made.compile(optimizer, loss(), **kwargs)
        x, y = data()
        callbacks = []
        if found:
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        # The same batch on both ranks: what BatchNorm sees is then the same.
        made.fit(x, y, 16, callbacks=callbacks, shuffle=False, verbose=0)
        found.append(made)
    return {
        "to_alone": weights_apart(found[1], found[0]),
        "ranks": ranks_apart(found[1]),
    }


@case
def broadcast_built():
    return _broadcast(lambda seed: model(seed=seed))


@case
def broadcast_unbuilt():
    return _broadcast(_unbuilt)


@case
def broadcast_eager():
    return {"ranks": _broadcast(_unbuilt, run_eagerly=True)["ranks"]}


@case
def broadcast_trained_optimizer():
    # Rank 1 alone has trained: its momenta and iterations are overwritten.
    x, y = data()
    made = model()
    optimizer = sgd()
    made.compile(optimizer, loss())
    if hvd.rank() == 1:
        made.fit(x, y, verbose=0)
    made.compile(hvd.DistributedOptimizer(optimizer), loss())
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(
        0, local_variables=[made.layers[0].bias]
    )
    callback.set_model(made)
    callback.on_train_begin()
    bias = made.layers[0].bias.numpy()
    others = [v.numpy() for v in made.weights if v is not made.layers[0].bias]
    state = [v.numpy() for v in made.optimizer.variables]
    everyone = hvd.allgather_object([*others, *state])
    apart = [float(np.abs(a - b).max()) for a, b in zip(*everyone, strict=True)]
    kept = hvd.allgather_object(float(np.abs(bias).max()))
    return {"apart": max(apart), "kept": kept}


class _Notes(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.seen = dict(logs)


@case
def metrics_averaged():
    made = model()
    made.compile(hvd.DistributedOptimizer(sgd()), loss(), metrics=["accuracy"])
    notes = [_Notes(), _Notes()]
    x, y = data()
    history = made.fit(
        mine(x),
        mine(y),
        validation_data=(x[: 20 + 8 * hvd.rank()], y[: 20 + 8 * hvd.rank()]),
        callbacks=[notes[0], hvd.callbacks.MetricAverageCallback(), notes[1]],
        verbose=0,
    )
    before = hvd.allgather_object(notes[0].seen)
    mean = {name: (before[0][name] + before[1][name]) / 2 for name in before[0]}
    return {
        "names": sorted(mean),
        "spread": max(abs(before[0][n] - before[1][n]) for n in mean),
        "off": max(abs(notes[1].seen[n] - mean[n]) for n in mean),
        "in_history": max(abs(history.history[n][0] - mean[n]) for n in mean),
    }


@case
def metrics_differ():
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0}
    if hvd.rank() == 1:
        logs["extra"] = 2.0
    return {"message": message(lambda: callback.on_epoch_end(0, logs))}


@case
def warm_up():
    """Against the update rule of Goyal et al., written out."""
    epochs, rate, factor = 3, 0.2, 0.9
    x, y = data(batches=4)
    made, alone = model(), model()
    made.compile(hvd.DistributedOptimizer(sgd(rate)), loss())
    rates = []
    callback = hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2)
    history = made.fit(
        mine(x),
        mine(y),
        GLOBAL_BATCH // 2,
        epochs=epochs,
        shuffle=False,
        callbacks=[callback],
        verbose=0,
    )
    sums = [tf.zeros(v.shape) for v in alone.trainable_variables]
    for step in range(4 * epochs):
        now = rate * min(0.5 + 0.5 * (step + 1) / 8, 1.0)
        rates.append(now)
        batch = slice(step % 4 * 16, step % 4 * 16 + 16)
        grads = gradients(alone, tf.constant(x[batch]), tf.constant(y[batch]))
        # Gradients are summed without their rates, which change.
        sums = [factor * s + g for s, g in zip(sums, grads, strict=True)]
        for v, s in zip(alone.trainable_variables, sums, strict=True):
            v.assign_sub(now * s)
    return {
        "to_alone": weights_apart(made, alone),
        "logged": history.history["lr"],
        "expected": [rates[3], rates[7], rates[11]],
    }


@case
def files():
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for suffix in ("keras", "h5"):
            alone = train(sgd(), alone=True)
            alone = train(alone.optimizer, alone=True, made=alone)
            ours = train(hvd.DistributedOptimizer(sgd()))
            path = pathlib.Path(folder) / f"model.{suffix}"
            ours.save(path)
            plain = keras.models.load_model(path)
            plain_sgd = type(plain.optimizer) is keras.optimizers.SGD
            found[f"{suffix}_is_plain"] = plain_sgd
            loaded = hvd.load_model(path)
            found[f"{suffix}_iterations"] = int(loaded.optimizer.iterations)
            x, y = data()
            loaded.fit(mine(x), mine(y), 8, epochs=2, shuffle=False, verbose=0)
            found[f"{suffix}_to_alone"] = weights_apart(loaded, alone)
            found[f"{suffix}_ranks"] = ranks_apart(loaded)
        return found


@case
def trained_before():
    alone = train(sgd(), alone=True)
    ours = train(sgd(), alone=True)
    alone = train(alone.optimizer, alone=True, made=alone)
    ours = train(hvd.DistributedOptimizer(ours.optimizer), made=ours)
    return outcome(ours, alone)


@case
def functions():
    rank = hvd.rank()
    variable = keras.Variable([1.0 + rank, 2.0])
    total = hvd.allreduce(np.array([rank, 1.0]), op=hvd.Sum)
    hvd.broadcast_variables([variable], root_rank=1)
    return {
        "sum": total.numpy().tolist(),
        "type": total.dtype.name,
        "mean": float(hvd.allreduce(float(rank))),
        "of_variable": hvd.allreduce(variable, op=hvd.Sum).numpy().tolist(),
        "gathered": hvd.allgather(np.full((1 + rank,), rank)).numpy().tolist(),
        "broadcast": float(hvd.broadcast(tf.constant(5.0 + rank), 1)),
        "scattered": hvd.allgather_object(
            hvd.reducescatter(np.arange(4.0) + rank, op=hvd.Sum)
            .numpy()
            .tolist()
        ),
        "object": hvd.broadcast_object({"rank": rank}, root_rank=1),
    }


@case
def local_layer():
    made = model()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=made.layers[1]
    )
    x, y = data()
    x, y = tf.constant(mine(x)[:8]), tf.constant(mine(y)[:8])
    own = gradients(made, x, y)[2].numpy()
    before = made.get_weights()
    optimizer.apply(gradients(made, x, y), made.trainable_variables)
    everyone = hvd.allgather_object(made.get_weights())
    moved = before[2] - made.get_weights()[2]
    return {
        "shared": float(np.abs(everyone[0][0] - everyone[1][0]).max()),
        "local": float(np.abs(everyone[0][2] - everyone[1][2]).max()),
        "off": float(np.abs(moved - 0.1 * own / 2).max()),
    }


@case
def refusals():
    def jit():
        train(hvd.DistributedOptimizer(sgd()), jit_compile=True)

    def strategy():
        optimizer = hvd.DistributedOptimizer(sgd())
        with kt.TowerStrategy():
            train(optimizer)

    def integers():
        optimizer = hvd.DistributedOptimizer(
            sgd(), compression=hvd.Compression.fp16
        )
        variable = keras.Variable([1.0])
        optimizer.apply([tf.constant([1])], [variable])

    return {
        "adasum": message(
            lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum)
        ),
        "jit": message(jit),
        "strategy": message(strategy),
        "integers": message(integers),
    }


@case
def auto_jit():
    """What Keras does on a machine with GPUs: XLA where nothing is said."""
    trainer = keras.Model.__mro__[2]
    resolve = trainer._resolve_auto_jit_compile
    trainer._resolve_auto_jit_compile = lambda self: True
    try:
        plain = model()
        plain.compile(sgd(), loss())
        ours = train(hvd.DistributedOptimizer(sgd()))
    finally:
        trainer._resolve_auto_jit_compile = resolve
    alone = trained_alone(sgd)
    return {**outcome(ours, alone), "plain_jit": plain.jit_compile}


@case
def sets_of_processes():
    """Ranks of different sets do not reduce with one another."""
    sets = [hvd.add_process_set([0]), hvd.add_process_set([1])]
    ours = train(hvd.DistributedOptimizer(sgd(), process_set=sets[hvd.rank()]))
    apart = ranks_apart(ours)
    for each in sets:
        hvd.remove_process_set(each)
    return {"ranks": apart}
