"""Checks of two ranks: callbacks, files, functions and refusals."""

import pathlib
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
import keras_towers.horovod as hvd
from tests.horovod.small import (
    GLOBAL_BATCH,
    ROUNDING,
    assert_as_alone,
    data,
    gradients,
    loss,
    mine,
    model,
    ranks_apart,
    sgd,
    train,
    trained_alone,
    weights_apart,
)
from tests.kit.ranks import check


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
    """A model of one process and one of ranks that started apart."""
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
    return found


@check
def all_ranks_begin_as_the_root_before_the_first_step():
    for make in (lambda seed: model(seed=seed), _unbuilt):
        alone, ours = _broadcast(make)
        assert weights_apart(ours, alone) < ROUNDING
        assert ranks_apart(ours) == 0


@check
def an_eager_unbuilt_model_is_broadcast_after_its_first_batch():
    _, ours = _broadcast(_unbuilt, run_eagerly=True)
    assert ranks_apart(ours) == 0


@check
def optimizer_state_is_broadcast_and_local_variables_are_not():
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
    for one, other in zip(*everyone, strict=True):
        np.testing.assert_array_equal(one, other)
    first, second = hvd.allgather_object(float(np.abs(bias).max()))
    assert first == 0
    assert second > 0


class _Notes(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.seen = dict(logs)


@check
def metrics_are_averaged_for_later_callbacks():
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
    assert sorted(mean) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert max(abs(before[0][n] - before[1][n]) for n in mean) > 1e-3
    for name, value in mean.items():
        assert abs(notes[1].seen[name] - value) < ROUNDING
        assert abs(history.history[name][0] - value) < ROUNDING


@check
def metrics_of_other_names_are_refused():
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0}
    if hvd.rank() == 1:
        logs["extra"] = 2.0
    with pytest.raises(kt.TowerError, match="differ in extra"):
        callback.on_epoch_end(0, logs)


@check
def warm_up_follows_the_rule_with_corrected_momentum():
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
    assert weights_apart(made, alone) < ROUNDING
    expected = [rates[3], rates[7], rates[11]]
    assert history.history["lr"] == pytest.approx(expected)


@check
def a_saved_model_goes_on_and_is_plain_elsewhere():
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("keras", "h5"):
            alone = train(sgd(), alone=True)
            alone = train(alone.optimizer, alone=True, made=alone)
            ours = train(hvd.DistributedOptimizer(sgd()))
            path = pathlib.Path(folder) / f"model.{suffix}"
            ours.save(path)
            plain = keras.models.load_model(path)
            assert type(plain.optimizer) is keras.optimizers.SGD
            loaded = hvd.load_model(path)
            assert int(loaded.optimizer.iterations) == 12
            x, y = data()
            loaded.fit(mine(x), mine(y), 8, epochs=2, shuffle=False, verbose=0)
            assert weights_apart(loaded, alone) < ROUNDING
            assert ranks_apart(loaded) == 0


@check
def trained_before():
    alone = train(sgd(), alone=True)
    ours = train(sgd(), alone=True)
    alone = train(alone.optimizer, alone=True, made=alone)
    ours = train(hvd.DistributedOptimizer(ours.optimizer), made=ours)
    assert_as_alone(ours, alone, iterations=24)


@check
def functions_take_arrays_numbers_tensors_and_variables():
    rank = hvd.rank()
    variable = keras.Variable([1.0 + rank, 2.0])
    total = hvd.allreduce(np.array([rank, 1.0]), op=hvd.Sum)
    hvd.broadcast_variables([variable], root_rank=1)
    assert total.dtype == tf.float64
    assert total.numpy().tolist() == [1.0, 2.0]
    assert float(hvd.allreduce(float(rank))) == 0.5
    of_variable = hvd.allreduce(variable, op=hvd.Sum)
    assert of_variable.numpy().tolist() == [4.0, 4.0]
    gathered = hvd.allgather(np.full((1 + rank,), rank))
    assert gathered.numpy().tolist() == [0, 1, 1]
    assert float(hvd.broadcast(tf.constant(5.0 + rank), 1)) == 6.0
    part = hvd.reducescatter(np.arange(4.0) + rank, op=hvd.Sum)
    assert part.numpy().tolist() == [[1.0, 3.0], [5.0, 7.0]][rank]
    assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}


@check
def a_local_layer_keeps_its_own_gradients():
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
    np.testing.assert_array_equal(everyone[0][0], everyone[1][0])
    assert np.abs(everyone[0][2] - everyone[1][2]).max() > 1e-3
    np.testing.assert_allclose(moved, 0.1 * own / 2, rtol=0, atol=ROUNDING)


@check
def what_would_go_wrong_is_refused():
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

    def adasum():
        hvd.DistributedOptimizer(sgd(), op=hvd.Adasum)

    for function, words in (
        (adasum, "built with MPI"),
        (jit, "jit_compile=False"),
        (strategy, "train outside the strategy's scope"),
        (integers, "cannot be compressed"),
    ):
        with pytest.raises(kt.TowerError, match=words):
            function()


@check
def auto_jit_is_off_only_for_a_distributed_optimizer():
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
    assert plain.jit_compile is True
    assert_as_alone(ours, trained_alone(sgd))


@check
def ranks_of_other_sets_do_not_take_part():
    sets = [hvd.add_process_set([0]), hvd.add_process_set([1])]
    ours = train(hvd.DistributedOptimizer(sgd(), process_set=sets[hvd.rank()]))
    apart = ranks_apart(ours)
    for each in sets:
        hvd.remove_process_set(each)
    assert apart > 1e-3
