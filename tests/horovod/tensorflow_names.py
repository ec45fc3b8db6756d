"""Checks of two ranks: names of ``horovod.tensorflow`` on Keras 3."""

import pathlib
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers.horovod as hvd
from keras_towers.horovod import tape as tape_lib
from tests.horovod.small import (
    GLOBAL_BATCH,
    ROUNDING,
    data,
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


def _loop(wrap):
    made, optimizer = model("words"), sgd()
    x, y = (mine(array) for array in data("words"))

    @wrap
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss()(y, made(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        variables = {v.path: v for v in made.trainable_variables}
        grads = tape.gradient(value, variables)
        optimizer.apply([grads[path] for path in variables], variables.values())

    half = GLOBAL_BATCH // 2
    for start in (*range(0, len(x), half), *range(0, len(x), half)):
        batch = slice(start, start + half)
        step(tf.constant(x[batch]), tf.constant(y[batch]))
    return made


@check
def a_tape_reduces_gradients_of_a_structure():
    for wrap in (lambda step: step, tf.function):
        ours = _loop(wrap)
        assert weights_apart(ours, trained_alone(sgd, "words")) < ROUNDING
        assert ranks_apart(ours) == 0
    # One for all steps of a loop, though each has a tape of its own.
    assert len(tape_lib._reducers) == 2


@check
def a_tape_does_not_reduce_local_sources():
    made = model()
    x, y = (tf.constant(mine(array)[:8]) for array in data())
    with hvd.PartialDistributedGradientTape(
        tf.GradientTape(persistent=True),
        local_layers=made.layers[1],
        scale_local_gradients=False,
    ) as tape:
        value = loss()(y, made(x))
    local, reduced = tape.get_local_and_global_gradients(
        value, made.trainable_variables
    )
    assert [variable.path for variable, _ in local + reduced] == [
        v.path for v in made.layers[1].weights + made.layers[0].weights
    ]
    first, second = hvd.allgather_object(
        [[grad.numpy() for _, grad in pairs] for pairs in (local, reduced)]
    )
    assert np.abs(first[0][0] - second[0][0]).max() > 1e-3
    for one, other in zip(first[1], second[1], strict=True):
        np.testing.assert_array_equal(one, other)


def _normalized(make):
    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.Input((6,)),
            make(momentum=0.8),
            keras.layers.Dense(8, activation="tanh"),
            make(),
            keras.layers.Dense(3),
        ]
    )


@check
def batch_normalization_is_that_of_the_whole_batch():
    if hvd.rank() == 1:
        hvd.SyncBatchNormalization()  # Numbers of names differ between ranks.
    found = []
    for alone in (True, False):
        x, y = data()
        x += 50.0  # Where mean(x^2) - mean(x)^2 cancels.
        if not alone:
            x, y = mine(x), mine(y)
        normalization = (
            keras.layers.BatchNormalization
            if alone
            else hvd.SyncBatchNormalization
        )
        made = _normalized(normalization)
        optimizer = sgd() if alone else hvd.DistributedOptimizer(sgd())
        made.compile(optimizer, loss(), steps_per_execution=3)
        size = GLOBAL_BATCH if alone else GLOBAL_BATCH // 2
        made.fit(x, y, size, epochs=2, shuffle=False, verbose=0)
        found.append(made)
    alone, ours = found
    assert weights_apart(ours, alone) < 2e-5
    assert ranks_apart(ours) == 0
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        ours.save(path)
        loaded = keras.models.load_model(path)
    assert isinstance(loaded.layers[0], hvd.SyncBatchNormalization)


@check
def batch_normalization_of_unequal_ranks_and_masks_has_right_gradients():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(7, 4, 2)).astype("float32")
    weights = rng.normal(size=x.shape).astype("float32")
    mask = rng.random((7, 4)) < 0.6
    rows = (slice(3), slice(3, 7))[hvd.rank()]
    for masks in (None, mask):
        found = []
        for part, make in (
            (slice(7), keras.layers.BatchNormalization),
            (rows, hvd.SyncBatchNormalization),
        ):
            layer = make()
            inputs = tf.constant(x[part])
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = layer(
                    inputs,
                    training=True,
                    mask=None if masks is None else tf.constant(masks[part]),
                )
                total = tf.reduce_sum(outputs * weights[part])
            gradient = tape.gradient(total, inputs)
            found.append((outputs.numpy(), gradient.numpy(), layer))
        (outputs, gradient, alone), (own, own_gradient, ours) = found
        np.testing.assert_allclose(own, outputs[rows], atol=1e-5)
        np.testing.assert_allclose(own_gradient, gradient[rows], atol=1e-5)
        np.testing.assert_allclose(
            ours.moving_variance, alone.moving_variance, atol=1e-5
        )


@check
def ranks_with_less_data_join():
    variable = keras.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for _ in range(3 - hvd.rank()):
        optimizer.apply([tf.constant([1.0, 4.0])], [variable])
    last = hvd.join()
    assert hvd.allgather_object(last) == [last, last]
    # Where rank 1 had nothing more to give, rank 0 had half of its gradient.
    expected = ([-1.5, -8.0], [-1.0, -6.0])[hvd.rank()]
    np.testing.assert_allclose(variable.numpy(), expected)


@check
def rows_and_groups_are_exchanged():
    rank = hvd.rank()
    rows = np.arange(4.0) + 10 * rank
    assert (
        hvd.alltoall(rows).numpy().tolist()
        == ([[0, 1, 10, 11], [2, 3, 12, 13]][rank])
    )
    got, counts = hvd.alltoall(keras.Variable(rows), splits=[1, 3])
    assert got.numpy().tolist() == [[0, 10], [1, 2, 3, 11, 12, 13]][rank]
    assert counts.numpy().tolist() == [[1, 1], [3, 3]][rank]
    pair = [keras.Variable([1.0 + rank, 2.0]), np.float32([rank, 4.0])]
    sums = hvd.grouped_allreduce(pair, op=hvd.Sum)
    assert [each.numpy().tolist() for each in sums] == [[3, 4], [1, 8]]
    gathered = hvd.grouped_allgather(pair)
    assert gathered[1].numpy().tolist() == [0, 4, 1, 4]
    parts = hvd.grouped_reducescatter(pair, op=hvd.Sum)
    assert [float(each[0]) for each in parts] == [[3, 1], [4, 8]][rank]
    hvd.broadcast_([pair[0].value], root_rank=1)
    assert pair[0].numpy().tolist() == [2.0, 2.0]
    slices = hvd.allreduce(
        tf.IndexedSlices(tf.ones((1, 2)), tf.constant([rank]), (3, 2)),
        op=hvd.Sum,
    )
    assert slices.indices.numpy().tolist() == [0, 1]


@check
def ranks_with_other_gradients_are_told():
    made = model()
    x, y = (tf.constant(mine(array)[:8]) for array in data())

    def step(optimizer, count):
        variables = made.trainable_variables[:count]
        with tf.GradientTape() as tape:
            value = loss()(y, made(x))
        optimizer.apply(tape.gradient(value, variables), variables)

    words = r"Only on rank 0: \S+/bias \[3\] float32 .* rank 1: no others"
    for wrap in (lambda function: function, tf.function):
        optimizer = hvd.DistributedOptimizer(sgd())
        one = wrap(lambda o=optimizer: step(o, 4 - hvd.rank()))
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            one()
    # Nothing is left behind, in eager mode and in a graph.
    train(hvd.DistributedOptimizer(sgd()), epochs=1)


@check
def ranks_with_gradients_of_other_shapes_are_told():
    variable = keras.Variable(np.zeros(3 + hvd.rank()), name="odd")
    optimizer = hvd.DistributedOptimizer(sgd())
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"rank 0: odd \[3\] float32 .* rank 1: odd \[4\] float32",
    ):
        optimizer.apply([tf.ones(3 + hvd.rank())], [variable])
