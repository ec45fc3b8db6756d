"""A worker: BytePS as a transport, and the drop-in, on two ranks."""

import contextlib
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import byteps as bps
from keras_towers.engines.byteps import byteps_transport
from keras_towers.engines.byteps.byteps_transport import BytePSTransport
from keras_towers.engines.dropin.gradient_reducer import reducer_of
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.ranks import check, main
from tests.processes import (  # noqa: F401
    callbacks as of_callbacks,
    differences,
    ended,
    exact,
    failures,
    over_tensorflow,
    own_loops,
    shares,
    small as s,
    training,
)
from tests.processes.small import RANK, X, Y, refused

NAN = float("nan")


@check
def many_rounds_of_one_name():
    """A server overwrites sums that a slower worker has not pulled."""
    transport = BytePSTransport()
    rank, ranks = transport.rank, transport.size

    @tf.function
    def rounds(number):
        wrong = 0
        for i in tf.range(number):
            mine = tf.fill([1000], tf.cast(10 * i + rank, tf.float32))
            (total,) = transport.all_reduce([mine], "rounds")
            wanted = tf.cast(ranks * 10 * i + sum(range(ranks)), tf.float32)
            wrong += tf.cast(tf.reduce_any(total != wanted), tf.int32)
        return wrong

    assert rounds(tf.constant(150)) == 0


@check
def a_constant_is_summed_at_every_call():
    transport = BytePSTransport()

    @tf.function
    def constant():
        return transport.all_reduce([tf.constant([1.0, 2.0])], "constant")[0]

    for _ in range(4):
        np.testing.assert_array_equal(constant(), [2.0, 4.0])


@check
def large_vectors_of_a_length_take_turns_with_two_names():
    transport, known = BytePSTransport(), {*byteps_transport._rounds}

    @tf.function
    def sums(x):
        return [
            transport.all_reduce([x + i], f"large.{i}")[0] for i in range(5)
        ]

    for step in range(3):
        for i, total in enumerate(sums(tf.fill([2**16], float(step)))):
            np.testing.assert_array_equal(total, [2 * (step + i)] * 2**16)
    assert len({*byteps_transport._rounds} - known) == 2


@check
def sums_of_unknown_length():
    transport = BytePSTransport()

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def total(tensor):
        return transport.all_reduce([tensor], "unknown")[0]

    # More than one message, whole messages, less than one, nothing.
    for rows in (500_000, 2**20, 5, 0, 5):
        tensor = tf.random.stateless_uniform([rows, 3], [1, rows])
        np.testing.assert_array_equal(total(tensor), 2 * tensor)


@check
def only_lengths_that_are_sent_take_memory():
    transport = BytePSTransport()

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def total(tensor):
        return transport.all_reduce([tensor], "few")[0]

    total.get_concrete_function()
    before = transport.kept_bytes
    for _ in range(3):
        total(tf.ones([5, 3]))
    assert 0 < transport.kept_bytes - before < 2**12


@check
def a_broadcast_keeps_nan_out_and_bits_as_they_are():
    transport = BytePSTransport()
    root = [tf.constant([-0.0, NAN, 1.0]), tf.constant(7), tf.zeros([0])]
    others = [tf.constant([NAN, 2.0, NAN]), tf.constant(8), tf.zeros([0])]
    for which in range(transport.size):
        mine = root if transport.rank == which else others
        got = transport.broadcast(mine, "broadcast", root=which)
        for value, wanted in zip(got, root, strict=True):
            assert value.numpy().tobytes() == wanted.numpy().tobytes()


@check
def ranks_that_sum_different_tensors_are_told():
    transport = BytePSTransport()
    said = "do not sum the same tensors: .*float32/2; .*float32/3"
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
        transport.all_reduce([tf.ones([2 + transport.rank])], "different")
    # And go on.
    assert transport.gather_objects(transport.rank) == [0, 1]


class DividedByLength(keras.layers.Layer):
    """Divides by a length: by a constant where TensorFlow knows it."""

    def call(self, x):
        length = x.shape[1] or tf.shape(x)[1]
        return x / tf.cast(length, x.dtype)


def _pooled(*more):
    keras.utils.set_random_seed(1)
    pool = keras.layers.GlobalAveragePooling1D()
    mine = keras.Sequential([keras.layers.Embedding(40, 2), *more, pool])
    mine.compile(keras.optimizers.SGD(1.0), "mse")
    return mine


# Of these, ranks take the first 5, or 5 and 7: a rank traces its step again for
# any length, while the other one takes the step that it has traced for 5.
TOKENS, LENGTH = np.arange(40).reshape(4, 10), 5 + 2 * RANK


@check
def a_rank_that_traces_the_same_step_again_goes_on_with_others():
    targets = Y[:4, :2]
    mine, alone = _pooled(), _pooled()
    with s.Strategy(batches="each"):
        for length in 5, LENGTH, 5:
            mine.train_on_batch(TOKENS[:, :length], targets)
    # One device has no batch with rows of two lengths.
    for lengths in (5, 5), (5, 7), (5, 5):
        with tf.GradientTape() as tape:
            losses = [(alone(TOKENS[:, :n]) - targets) ** 2 for n in lengths]
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, alone.trainable_variables)
        alone.optimizer.apply(gradients, alone.trainable_variables)
    s.assert_same_model(mine, alone)


@check
def a_rank_that_traces_another_step_while_others_take_theirs_is_told():
    targets = Y[:4, :2]
    mine = _pooled(DividedByLength())
    with s.Strategy(batches="each"):
        mine.train_on_batch(TOKENS[:, :5], targets)
        before = mine.get_weights()
        shapes = "the shapes of a batch, which differ: rank 0: (None, 5)"
        with refused("the ranks have different steps", shapes):
            mine.train_on_batch(TOKENS[:, :LENGTH], targets)
        assert_all_close(mine.get_weights(), before, 0)
        # And go on.
        mine.train_on_batch(TOKENS[:, :5], targets)
    s.assert_same_model(mine)


@check
def the_drop_in_trains_as_one_process():
    """Each rank has other weights, and half of every batch."""
    bps.init()
    mine, alone = s.model(seed=RANK), s.eager(optimizer=_sgd())
    optimizer = bps.DistributedOptimizer(_sgd())
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
    with refused(
        "compression='fp16' is not allowed, since it has no", "bps.Compression"
    ):
        bps.push_pull(1.0, compression="fp16")
    with refused("rank 2 cannot broadcast: the job has ranks 0 to 1"):
        bps.broadcast_variables([variable], 2)
    assert (bps.local_rank(), bps.local_size()) == (RANK, 2)
    with refused("bps.broadcast_variables(model.weights"):
        bps.broadcast_global_variables(0)
    with tempfile.TemporaryDirectory() as folder:
        # A folder of each rank.
        with kt.save_on_every_rank():
            s.eager().save(f"{folder}/model.keras")
        loaded = bps.load_model(f"{folder}/model.keras")
    assert reducer_of(loaded.optimizer) is not None


@check
def learning_rates_are_set_by_the_callbacks_of_byteps():
    """As BytePS orders their arguments: a rate to multiply is the last."""
    bps.init()
    schedule = bps.callbacks.LearningRateScheduleCallback
    warm_up = bps.callbacks.LearningRateWarmupCallback
    for callbacks, wanted in (
        # The factors are not multiplied again in each epoch.
        ([schedule(0.5, 1, 3), schedule(0.25, 3)], [0.1, 0.05, 0.05, 0.025]),
        ([schedule(lambda epoch: epoch + 1, initial_lr=0.2)], [0.2, 0.4]),
        ([warm_up(2)], [0.075, 0.1, 0.1]),
    ):
        made = s.model()
        made.compile(bps.DistributedOptimizer(_sgd()), "mse")
        history = s.fit(
            made, X[:16], Y[:16], epochs=len(wanted), callbacks=callbacks
        )
        assert_close(history.history["lr"], wanted)
    half = schedule(0.5)
    for _ in range(2):  # The rate is not halved again.
        history = s.fit(made, X[:16], Y[:16], callbacks=[half])
        assert_close(history.history["lr"], [0.05])


@check
def rows_of_a_table_are_averaged_by_the_drop_in():
    bps.init()
    table = keras.Variable(np.zeros([4, 1], "float32"))
    mine = tf.IndexedSlices(tf.ones([2, 1]), tf.constant([RANK, 3]))
    bps.DistributedOptimizer(_sgd()).apply([mine], [table])
    wanted = [[-0.05], [-0.05], [0.0], [-0.1]]
    assert_close(table, wanted)


def _sgd():
    return keras.optimizers.SGD(0.1)


if __name__ == "__main__":
    main()
