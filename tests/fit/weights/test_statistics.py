"""What cannot equal one device is as documented: statistics, random masks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import weights_of
from tests.kit.training import strategy_of

X, Y = m.FEATURES[:24], m.LABELS[:24]
MOMENTUM, EPSILON = 0.8, 1e-3


def normalised(momentum=MOMENTUM):
    """BatchNorm right behind the input, so that numpy can follow it."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.BatchNormalization(
                momentum=momentum, epsilon=EPSILON, name="norm"
            ),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), m.cross_entropy())
    return model


def pieces(batch, towers):
    return [p for p in np.array_split(batch, towers) if len(p)]


def expected(batches, towers):
    """Move statistics by those of the towers' parts, weighted by their size."""
    mean, variance, rate = np.zeros(6), np.ones(6), 1 - MOMENTUM
    for batch in batches:
        parts = pieces(batch, towers)
        sizes = [len(part) for part in parts]
        means = np.average([p.mean(0) for p in parts], 0, sizes)
        variances = np.average([p.var(0) for p in parts], 0, sizes)
        mean += rate * (means - mean)
        variance += rate * (variances - variance)
    return mean, variance


def statistics(model):
    norm = model.get_layer("norm")
    return norm.moving_mean.numpy(), norm.moving_variance.numpy()


def assert_statistics(model, wanted):
    for found, value in zip(statistics(model), wanted, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [6, 7])
def test_statistics_of_prefetched_batches_are_weighted_by_their_parts(batch):
    # TensorFlow divides 6 examples over 4 towers as 2, 2, 2 and 0.
    model = normalised()
    with strategy_of(4, prefetch=True):
        model.fit(X, Y, batch_size=batch, shuffle=False, verbose=0)
    mean = np.zeros(6)
    for start in range(0, len(X), batch):
        rate = 1 - MOMENTUM
        mean += rate * (X[start : start + batch].mean(0) - mean)
    found, _ = statistics(model)
    np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("towers", [2, 4])
@pytest.mark.parametrize("batch", [24, 7, 2])
def test_moving_statistics_are_the_mean_over_towers(towers, batch):
    # Batches of 2 on 4 towers leave two towers without examples.
    model = normalised()
    with kt.TowerStrategy(towers):
        model.fit(X, Y, batch_size=batch, shuffle=False, verbose=0)
        inside = statistics(model)
    batches = [X[i : i + batch] for i in range(0, len(X), batch)]
    wanted = expected(batches, towers)
    assert_statistics(model, wanted)
    for found, value in zip(inside, wanted, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)


def test_a_tower_without_examples_counts_nothing():
    model = normalised()
    norm = model.get_layer("norm")
    with kt.TowerStrategy(4):
        model.train_on_batch(X[:2], Y[:2])
        wanted = 0.2 * X[:2].mean(0)
        np.testing.assert_allclose(norm.moving_mean.numpy(), wanted, rtol=1e-4)
        # The next batch begins where all towers have the same.
        model.train_on_batch(X[:8], Y[:8])
        wanted = 0.8 * wanted + 0.2 * X[:8].mean(0)
        np.testing.assert_allclose(norm.moving_mean.numpy(), wanted, rtol=1e-4)


def test_a_tower_normalises_with_its_own_part():
    model = normalised()
    kernel, bias = (v.numpy() for v in model.layers[-1].weights)
    with kt.TowerStrategy(2):
        loss = model.train_on_batch(X, Y)
    outputs = []
    for piece in pieces(X, 2):
        centred = (piece - piece.mean(0)) / np.sqrt(piece.var(0) + EPSILON)
        outputs.append(centred @ kernel + bias)
    wanted = m.cross_entropy()(Y, np.concatenate(outputs).astype("float32"))
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)


@pytest.mark.parametrize("sync", [True, False])
def test_evaluate_gives_the_same_inside_and_after(sync):
    model = normalised()
    with kt.TowerStrategy(3, sync_every_epoch=sync):
        model.fit(X, Y, batch_size=7, epochs=2, verbose=0)
        inside = model.evaluate(X, Y, verbose=0)
        predicted = model.predict(X, verbose=0)
    np.testing.assert_allclose(
        model.evaluate(X, Y, verbose=0), inside, rtol=1e-6
    )
    np.testing.assert_allclose(
        model.predict(X, verbose=0), predicted, rtol=1e-5, atol=1e-6
    )


def test_validation_uses_the_merged_statistics():
    model = normalised()
    with kt.TowerStrategy(3):
        history = model.fit(
            X, Y, batch_size=8, verbose=0, validation_data=(X, Y)
        ).history
    np.testing.assert_allclose(
        history["val_loss"][-1], model.evaluate(X, Y, verbose=0), rtol=1e-6
    )


class Spoil(keras.callbacks.Callback):
    """Write to one tower's component in the middle of an epoch."""

    def __init__(self, variable):
        super().__init__()
        self.variable = variable
        self.at_end = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            component = self.variable()._value.values[1]
            component.assign(tf.fill(component.shape, 99.0))

    def on_epoch_end(self, epoch, logs=None):
        values = self.variable()._value.values
        self.at_end.append([value.numpy() for value in values])


def spoilt(variable, sync, trainable=True):
    """Values on the towers at the ends of two epochs of a spoilt fit."""
    model = normalised()
    if not trainable:
        # Nothing updates it, so nothing but a broadcast can repair it.
        model.layers[-1].trainable = False
        model.compile(keras.optimizers.SGD(0.1), m.cross_entropy())
    spoil = Spoil(lambda: variable(model))
    with kt.TowerStrategy(3, sync_every_epoch=sync):
        model.fit(X, Y, batch_size=12, verbose=0, epochs=2, callbacks=[spoil])
    return model, spoil.at_end


@pytest.mark.parametrize("sync", [True, False])
def test_weights_are_set_equal_at_the_end_of_an_epoch(sync):
    _, ends = spoilt(lambda model: model.layers[-1].kernel, sync, False)
    for first, *others in ends:
        assert first.max() < 90
        for index, other in enumerate(others, 1):
            if sync or index == 2:
                np.testing.assert_array_equal(other, first)
            else:
                np.testing.assert_array_equal(other, np.full((6, 3), 99.0))


@pytest.mark.parametrize("sync", [True, False])
def test_statistics_are_set_equal_at_the_end_of_an_epoch(sync):
    _, ends = spoilt(lambda model: model.layers[0].moving_mean, sync)
    for values in ends:
        equal = all(np.array_equal(values[0], v) for v in values)
        assert equal == sync


def test_towers_start_from_the_first_one():
    model = normalised()
    model.layers[0].moving_mean.assign(np.arange(6.0))
    kernel = model.layers[-1].kernel.numpy()
    with kt.TowerStrategy(3) as strategy:
        strategy.adopt(model)
        for value in model.layers[0].moving_mean._value.values:
            np.testing.assert_array_equal(value, np.arange(6.0))
        for value in model.layers[-1].kernel._value.values:
            np.testing.assert_array_equal(value, kernel)


class Draw(keras.layers.Layer):
    """Notes what a random layer makes of ones on every tower."""

    def __init__(self, layer, note):
        super().__init__()
        self.layer, self.note = layer, note

    def call(self, inputs, training=False):
        outputs = self.layer(tf.ones_like(inputs), training=training)
        context = tf.distribute.get_replica_context()
        index = context.replica_id_in_sync_group
        tf.py_function(self.note, [index, outputs], [])
        return inputs


RANDOM = {
    "dropout": lambda seed: keras.layers.Dropout(0.5, seed=seed),
    "noise": lambda seed: keras.layers.GaussianNoise(1.0, seed=seed),
    "gaussian dropout": lambda seed: keras.layers.GaussianDropout(
        0.5, seed=seed
    ),
}


def drawn(kind, towers, seed=None, steps=2):
    """What every tower draws, and the weights after training."""
    keras.utils.set_random_seed(4)
    seen = {}

    def note(index, outputs):
        seen.setdefault(int(index), []).append(outputs.numpy())

    model = keras.Sequential(
        [
            keras.Input((6,)),
            Draw(RANDOM[kind](seed), note),
            RANDOM[kind](seed),
            keras.layers.Dense(3),
        ]
    )
    model.compile("sgd", m.cross_entropy())
    x, y = X[: 4 * towers * steps], Y[: 4 * towers * steps]
    with kt.TowerStrategy(towers):
        model.fit(x, y, batch_size=4 * towers, shuffle=False, verbose=0)
    return seen, weights_of(model), model


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("kind", RANDOM)
def test_random_layers(kind, seed):
    seen, weights, _ = drawn(kind, 3, seed)
    again, same_weights, _ = drawn(kind, 3, seed)
    alone, _, _ = drawn(kind, 1, seed)
    assert {index: len(steps) for index, steps in seen.items()} == {
        0: 2,
        1: 2,
        2: 2,
    }
    for index in seen:
        np.testing.assert_array_equal(seen[index], again[index])
        # A mask is drawn anew for every step.
        assert not np.array_equal(seen[index][0], seen[index][1])
        for other in range(index):
            assert not np.array_equal(seen[index][0], seen[other][0])
    # Two traces may add the same numbers in another order.
    for name, value in weights.items():
        np.testing.assert_allclose(
            same_weights[name], value, rtol=1e-6, atol=1e-8
        )
    # Tower 0 draws what one device would draw.
    np.testing.assert_array_equal(seen[0], alone[0])


def test_the_seed_goes_on_after_the_towers():
    _, _, model = drawn("dropout", 3)
    _, _, alone = drawn("dropout", 1)
    for found, wanted in zip(model.variables, alone.variables, strict=True):
        if "seed" in wanted.path:
            np.testing.assert_array_equal(found.numpy(), wanted.numpy())


def test_random_images():
    def train():
        keras.utils.set_random_seed(4)
        model = keras.Sequential(
            [
                keras.Input((4, 4, 1)),
                keras.layers.RandomFlip(),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", m.cross_entropy())
        images = np.arange(12 * 16, dtype="float32").reshape(12, 4, 4, 1)
        with kt.TowerStrategy(3):
            model.fit(images / 192, Y[:12], batch_size=6, verbose=0)
        return weights_of(model)

    first, second = train(), train()
    # Two traces may add the same numbers in another order.
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=1e-6, atol=1e-7)
