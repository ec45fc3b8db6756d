"""Checks of two ranks: callbacks, functions and refusals."""

import functools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import horovod as hvd
from keras_towers.inspection.conformance import case_models as m
from tests.engines.horovod import small
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.ranks import check


@check
def all_begin_as_the_root_but_for_local_variables():
    # Rank 1 alone has trained: its momenta and iterations are overwritten.
    made = m.mlp()
    optimizer = m.momentum()
    made.compile(optimizer, m.cross_entropy(), run_eagerly=True)
    if hvd.rank() == 1:
        made.train_on_batch(*small.first_batch())
    made.compile(hvd.DistributedOptimizer(optimizer), m.cross_entropy())
    bias = made.weights[1]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(
        0, local_variables=[bias]
    )
    callback.set_model(made)
    callback.on_train_begin()
    others = [v for v in made.weights if v is not bias]
    assert small.difference_between_ranks([*others, *optimizer.variables]) == 0
    assert small.difference(made.weights[2:], m.mlp().weights[2:]) == 0
    first, second = hvd.allgather_object(float(np.abs(bias).max()))
    assert first == 0
    assert second > 0


@check
def an_unbuilt_model_is_broadcast_with_its_first_batch():
    # The same batches on both ranks: what BatchNorm sees is the same.
    x, y = m.FEATURES[:32], m.LABELS[:32]

    def trained(seed, optimizer, eagerly, *callbacks):
        keras.utils.set_random_seed(seed)
        made = keras.Sequential(
            [
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.0),
                keras.layers.Dense(3),
            ]
        )
        made.compile(optimizer, m.cross_entropy(), run_eagerly=eagerly)
        made.fit(x, y, 16, callbacks=callbacks, shuffle=False, verbose=0)
        return made.weights

    alone = trained(0, m.momentum(), True)
    for eagerly in (False, True):
        ours = trained(
            hvd.rank(),
            hvd.DistributedOptimizer(m.momentum()),
            eagerly,
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        )
        assert small.difference_between_ranks(ours) == 0
        # In eager mode the ranks have trained one batch before.
        assert eagerly or small.difference(ours, alone) < small.ROUNDING


def _notes(seen):
    return keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.update(logs)
    )


@check
def warm_up_follows_the_rule_with_corrected_momentum_and_metrics_are_means():
    """Against the update rule of Goyal et al., written out."""
    epochs, steps, rate, factor = 3, 2, 0.2, 0.9
    count = steps * small.GLOBAL_BATCH
    x, y = m.FEATURES[:count], m.LABELS[:count]
    made, alone = m.mlp(), m.mlp()
    optimizer = keras.optimizers.SGD(rate, momentum=factor)
    made.compile(
        hvd.DistributedOptimizer(optimizer), m.cross_entropy(), metrics=["acc"]
    )
    rates = []
    before, after = {}, {}
    history = made.fit(
        small.mine(x),
        small.mine(y),
        small.GLOBAL_BATCH // 2,
        epochs=epochs,
        shuffle=False,
        callbacks=[
            _notes(before),
            hvd.callbacks.MetricAverageCallback(),
            _notes(after),
            hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
        ],
        verbose=0,
    ).history
    sums = [tf.zeros(v.shape) for v in alone.trainable_variables]
    for step in range(epochs * steps):
        now = rate * min(0.5 + 0.5 * (step + 1) / (2 * steps), 1.0)
        rates.append(now)
        first = step % steps * small.GLOBAL_BATCH
        batch = slice(first, first + small.GLOBAL_BATCH)
        grads = small.gradients(
            alone, tf.constant(x[batch]), tf.constant(y[batch])
        )
        # Gradients are summed without their rates, which change.
        sums = [factor * s + g for s, g in zip(sums, grads, strict=True)]
        for v, s in zip(alone.trainable_variables, sums, strict=True):
            v.assign_sub(now * s)
    assert small.difference(made.weights, alone.weights) < small.ROUNDING
    assert history["lr"] == pytest.approx(rates[steps - 1 :: steps])
    one, other = hvd.allgather_object(before)
    assert sorted(one) == ["acc", "loss"]
    assert abs(one["loss"] - other["loss"]) > 1e-3
    mean = {name: pytest.approx((one[name] + other[name]) / 2) for name in one}
    assert after == mean
    assert {name: history[name][-1] for name in mean} == mean


@check
def functions_take_arrays_numbers_tensors_and_variables():
    rank = hvd.rank()
    variable = keras.Variable([1.0 + rank, 2.0])
    total = hvd.allreduce(np.array([rank, 1.0]), op=hvd.Sum)
    assert total.dtype == tf.float64
    assert float(hvd.allreduce(float(rank))) == 0.5
    assert float(hvd.broadcast(tf.constant(5.0 + rank), 1)) == 6.0
    assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([rank]), (3, 2))
    slices = hvd.allreduce(slices, op=hvd.Sum)
    pair = [variable, np.float32([rank, 4.0])]
    rows = np.arange(4.0) + 10 * rank
    got, counts = hvd.alltoall(keras.Variable(rows), splits=[1, 3])
    parts = hvd.grouped_reducescatter(pair, op=hvd.Sum)
    for found, one, other in (
        (total, [1, 2], [1, 2]),
        (hvd.allreduce(variable, op=hvd.Sum), [3, 4], [3, 4]),
        (hvd.allreduce(variable, "keras", False), [3, 4], [3, 4]),
        (hvd.allreduce(variable, False), [3, 4], [3, 4]),  # As in TensorFlow's.
        (hvd.allreduce(tensor=variable, average=False), [3, 4], [3, 4]),
        (hvd.allgather(np.full((1 + rank,), rank)), [0, 1, 1], [0, 1, 1]),
        (hvd.reducescatter(rows, op=hvd.Sum), [10, 12], [14, 16]),
        (hvd.alltoall(rows), [0, 1, 10, 11], [2, 3, 12, 13]),
        (got, [0, 10], [1, 2, 3, 11, 12, 13]),
        (counts, [1, 1], [3, 3]),
        (slices.indices, [0, 1], [0, 1]),
        (hvd.grouped_allreduce(pair, op=hvd.Sum)[1], [1, 8], [1, 8]),
        (hvd.grouped_allgather(pair)[1], [0, 4, 1, 4], [0, 4, 1, 4]),
        (tf.concat(parts, 0), [3, 1], [4, 8]),
    ):
        assert found.numpy().tolist() == (one, other)[rank], found
    hvd.broadcast_variables([variable], root_rank=1)
    assert variable.numpy().tolist() == [2.0, 2.0]
    variable.assign([rank, rank])
    hvd.broadcast_([variable.value], root_rank=1)
    assert variable.numpy().tolist() == [1.0, 1.0]


@check
def a_local_layer_keeps_its_own_gradients():
    made = m.mlp()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=made.layers[1]
    )
    x, y = small.first_batch()
    own = small.gradients(made, x, y)[2].numpy()
    before = made.get_weights()[2]
    optimizer.apply(small.gradients(made, x, y), made.trainable_variables)
    assert small.difference_between_ranks(made.layers[0].weights) == 0
    assert small.difference_between_ranks(made.layers[1].weights) > 1e-3
    moved = before - made.get_weights()[2]
    assert_close(moved, 0.1 * own / 2)


@check
def callbacks_that_some_ranks_lack_act_for_all():
    x, y = small.first_batch()
    y = tf.one_hot(y, 3)

    def fit(*callbacks):
        made = m.mlp()
        rule = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        made.compile(hvd.DistributedOptimizer(rule), "mse", run_eagerly=True)
        of_rank_0 = {"callbacks": callbacks, "validation_data": (x, y)}
        own = {} if hvd.rank() else of_rank_0
        made.fit(x, y, 4, epochs=4, verbose=0, **own)
        return made

    class Begins(keras.callbacks.Callback):
        """Goes on where it was, and changes what it likes."""

        def on_train_begin(self, logs=None):
            self.model._initial_epoch = 2
            for weight in self.model.weights:
                weight.assign(0.5 * weight)

    stops = keras.callbacks.EarlyStopping(
        "loss", mode="max", restore_best_weights=True
    )
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5**epoch)
    for callbacks, steps, rate in (
        ([stops, rates], 4, 0.5),
        ([Begins()], 4, 0.1),
        ([keras.callbacks.CSVLogger(os.devnull)], 8, 0.1),
        ([keras.callbacks.SwapEMAWeights()], 8, 0.1),
    ):
        made = fit(*callbacks)
        rule = made.optimizer
        variables = [*made.weights, *rule.variables]
        assert small.difference_between_ranks(variables) == 0, callbacks
        done = hvd.allgather_object(int(rule.iterations))
        assert done == [steps, steps], callbacks
        assert float(rule.learning_rate) == np.float32(rate)


@check
def a_state_is_synced_restored_and_committed():
    made = m.mlp()
    made.set_weights([w + hvd.rank() for w in made.get_weights()])
    first = m.mlp().get_weights()
    rank = hvd.rank()
    state = hvd.elastic.KerasState(made, m.momentum(), batch=20 + rank, epoch=3)
    state.sync()

    def is_at(factor, batch):
        assert state.batch == batch
        assert_all_close(made.get_weights(), [factor * w for w in first], 0)

    is_at(1, 20)
    for ends, factor, batch in ((state.restore, 1, 20), (state.commit, 2, 21)):
        made.set_weights([2 * weight for weight in first])
        state.batch = 21
        ends()
        state.restore()
        is_at(factor, batch)


@check
def ranks_of_other_sets_do_not_take_part():
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    of = {"process_set": sets[hvd.rank()]}
    mine = tf.constant([1.0 + hvd.rank()])
    assert hvd.allreduce(mine, op=hvd.Sum, **of) == mine
    assert hvd.allgather(mine, **of).shape == (1,)
    assert hvd.broadcast(mine, hvd.rank(), **of) == mine
    assert hvd.allgather_object(hvd.rank(), **of) == [hvd.rank()]
    with tf.GradientTape() as tape:
        tape.watch(mine)
        value = mine * mine
    tape = hvd.DistributedGradientTape(tape, **of)
    assert tape.gradient(value, mine) == 2 * mine
    variable = keras.Variable([1.0])
    hvd.DistributedOptimizer(m.momentum(), **of).apply([mine], [variable])
    assert_close(variable, [0.9 - 0.1 * hvd.rank()])
    # A fit on some ranks does not wait for the rest.
    if hvd.rank() == 0:
        made = m.mlp()
        optimizer = hvd.DistributedOptimizer(m.momentum(), **of)
        made.compile(optimizer, m.cross_entropy(), run_eagerly=True)
        stops = keras.callbacks.EarlyStopping("loss")
        made.fit(*small.first_batch(), callbacks=[stops], verbose=0)
    for each in sets:
        hvd.remove_process_set(each)


@check
def what_would_go_wrong_is_refused():
    def distributed(**options):
        return hvd.DistributedOptimizer(m.momentum(), **options)

    averaging = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0, **({"extra": 2.0} if hvd.rank() else {})}
    # As after an epoch of a model that logs nothing.
    no_logs = {"loss": 1.0} if hvd.rank() else None
    optimizer = distributed()
    xla = {"jit_compile": True}

    def end(batch, logs):
        raise StopIteration

    ends = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    own, (x, y) = m.mlp(), small.first_batch()
    own.compile(distributed(), "mse", run_eagerly=True)
    ended = functools.partial(own.fit, x, tf.one_hot(y, 3), callbacks=[ends])
    for function, words in (
        (lambda: distributed(op=hvd.Adasum), "built with MPI"),
        (lambda: small.train(distributed(), **xla), "jit_compile=False"),
        (lambda: ended(verbose=0), "takes for the end of the data"),
        (lambda: averaging.on_epoch_end(0, logs), "differ in extra"),
        (lambda: averaging.on_epoch_end(0, no_logs), "differ in loss"),
    ):
        with pytest.raises(kt.TowerError, match=words):
            function()
    words = "train outside the strategy's scope"
    with kt.TowerStrategy(), pytest.raises(kt.TowerError, match=words):
        small.train(optimizer)
