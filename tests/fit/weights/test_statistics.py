"""What cannot equal one device is as documented: statistics, random masks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import close
from tests.kit.training import linear, strategy_of

X, Y = m.FEATURES[:24], m.LABELS[:24]
MOMENTUM, EPSILON = 0.8, 1e-3
RATE = 1 - MOMENTUM


def normalised(**options):
    """BatchNorm right behind the input, so that numpy can follow it."""
    keras.utils.set_random_seed(1)
    norm = keras.layers.BatchNormalization(
        momentum=MOMENTUM, epsilon=EPSILON, name="norm"
    )
    model = keras.Sequential([keras.Input((6,)), norm, keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), m.cross_entropy(), **options)
    return model


def pieces(batch, towers):
    return [p for p in np.array_split(batch, towers) if len(p)]


def statistics(model):
    norm = model.get_layer("norm")
    return norm.moving_mean.numpy(), norm.moving_variance.numpy()


@pytest.mark.parametrize("prefetch", [False, True])
def test_moving_statistics_are_weighted_by_the_towers_parts(prefetch):
    # The last batch, of 3, leaves a tower without examples.
    model = normalised()
    with strategy_of(4, prefetch):
        model.fit(X, Y, batch_size=7, shuffle=False, verbose=0)
        inside = statistics(model)
    mean, variance = np.zeros(6), np.ones(6)
    for batch in [X[i : i + 7] for i in range(0, len(X), 7)]:
        mean += RATE * (batch.mean(0) - mean)
        parts = pieces(batch, 4)
        sizes = [len(part) for part in parts]
        variances = np.average([p.var(0) for p in parts], 0, sizes)
        variance += RATE * (variances - variance)
    for found in (inside, statistics(model)):
        close(found[0], mean, 1e-5)
        if not prefetch:  # There TensorFlow divides the batch.
            close(found[1], variance, 1e-5)


def test_a_tower_normalises_with_its_own_part():
    model = normalised(run_eagerly=True)
    kernel, bias = (v.numpy() for v in model.layers[-1].weights)
    with kt.TowerStrategy(2):
        loss = model.train_on_batch(X, Y)
    outputs = []
    for piece in pieces(X, 2):
        centred = (piece - piece.mean(0)) / np.sqrt(piece.var(0) + EPSILON)
        outputs.append(centred @ kernel + bias)
    wanted = m.cross_entropy()(Y, np.concatenate(outputs).astype("float32"))
    close(loss, wanted, 1e-5)


def test_merged_statistics_are_used_to_validate_evaluate_and_predict():
    """Inside as after the block."""
    model = normalised()
    with kt.TowerStrategy(2, sync_every_epoch=False):
        history = model.fit(
            X, Y, batch_size=7, verbose=0, validation_data=(X, Y)
        ).history
        inside = model.evaluate(X, Y, verbose=0)
        predicted = model.predict(X, verbose=0)
    evaluated = model.evaluate(X, Y, verbose=0)
    close([inside, history["val_loss"][-1]], 2 * [evaluated])
    close(model.predict(X, verbose=0), predicted, 1e-5)


class Spoil(keras.callbacks.Callback):
    """Write to one tower's components in the middle of an epoch."""

    def __init__(self, variables):
        super().__init__()
        self.variables = variables
        self.at_end = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            for variable in self.variables:
                component = variable._value.values[1]
                component.assign(tf.fill(component.shape, 99.0))

    def on_epoch_end(self, epoch, logs=None):
        self.at_end.append(
            [[v.numpy() for v in var._value.values] for var in self.variables]
        )


@pytest.mark.parametrize("sync", [True, False])
def test_towers_are_set_equal_at_the_end_of_an_epoch(sync):
    model = normalised()
    # Nothing updates its kernel, so nothing but a broadcast can repair it.
    model.layers[-1].trainable = False
    model.compile(keras.optimizers.SGD(0.1), m.cross_entropy())
    spoil = Spoil([model.layers[-1].kernel, model.layers[0].moving_mean])
    with kt.TowerStrategy(3, sync_every_epoch=sync):
        model.fit(X, Y, batch_size=12, verbose=0, epochs=2, callbacks=[spoil])
    for (first, spoilt, third), means in spoil.at_end:
        assert first.max() < 90
        np.testing.assert_array_equal(third, first)
        wanted = first if sync else np.full((6, 3), 99.0)
        np.testing.assert_array_equal(spoilt, wanted)
        equal = all(np.array_equal(means[0], mean) for mean in means)
        assert equal == sync


class Noting(keras.layers.Dropout):
    """Notes on every tower what it draws."""

    def __init__(self):
        super().__init__(0.5, seed=7)
        self.seen = {}

    def call(self, inputs, training=False):
        context = tf.distribute.get_replica_context()
        outputs = super().call(tf.ones_like(inputs), training)
        tf.py_function(
            self.note, [context.replica_id_in_sync_group, outputs], []
        )
        return outputs * inputs

    def note(self, index, outputs):
        self.seen.setdefault(int(index), []).append(outputs.numpy())


def drawn(towers):
    """What every tower draws, and the states of random layers after it."""
    layer = Noting()
    model = linear(layer)
    x, y = m.FEATURES[: 8 * towers], m.LABELS[: 8 * towers]
    with kt.TowerStrategy(towers):
        model.fit(x, y, batch_size=4 * towers, verbose=0)
    return layer.seen, [v.numpy() for v in layer.variables]


def test_each_tower_draws_by_itself():
    (seen, states), (again, _), (alone, wanted) = map(drawn, (2, 2, 1))
    np.testing.assert_equal(seen, again)
    # A mask is drawn anew for every step, and tower 0 draws that of one device.
    assert not np.array_equal(*seen[1])
    assert not np.array_equal(seen[0][0], seen[1][0])
    np.testing.assert_equal(seen[0], alone[0])
    # Its stream is the model's own: it goes on where it stopped.
    np.testing.assert_equal(states, wanted)
