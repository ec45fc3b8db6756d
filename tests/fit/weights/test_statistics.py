"""``batch_norm="tower"``: statistics of each tower's rows, as documented."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.training import linear, strategy_of

pytestmark = pytest.mark.alternate

# The last batch, of 3, leaves a tower without examples.
COUNT, BATCH, TOWERS = 24, 7, 4
X, Y = m.FEATURES[:COUNT], m.LABELS[:COUNT]
MOMENTUM, EPSILON, RATE = 0.8, 1e-3, 0.1


def normalised():
    norm = keras.layers.BatchNormalization(momentum=MOMENTUM, epsilon=EPSILON)
    hidden = keras.layers.Dense(5, use_bias=False)
    return linear(hidden, norm, optimizer=lambda: keras.optimizers.SGD(RATE))


def trained_by_hand(model):
    """The losses of an epoch, and the weights after it."""
    hidden, gamma, beta, mean, variance, kernel, bias = found = [
        tf.Variable(weight) for weight in model.get_weights()
    ]
    trainable = hidden, gamma, beta, kernel, bias
    losses = []
    for start in range(0, COUNT, BATCH):
        rows = slice(start, min(start + BATCH, COUNT))
        parts = [p for p in np.array_split(X[rows], TOWERS) if len(p)]
        sizes = [len(part) for part in parts]
        with tf.GradientTape() as tape:
            values = [part @ hidden for part in parts]
            moments = [tf.nn.moments(value, [0]) for value in values]
            normed = [
                tf.nn.batch_normalization(value, *of_part, beta, gamma, EPSILON)
                for value, of_part in zip(values, moments, strict=True)
            ]
            scores = tf.concat(normed, 0) @ kernel + bias
            losses.append(m.cross_entropy()(Y[rows], scores))
        for moving, of_parts in zip(
            (mean, variance), zip(*moments, strict=True), strict=True
        ):
            of_batch = np.average(of_parts, 0, sizes)
            moving.assign(MOMENTUM * moving + (1 - MOMENTUM) * of_batch)
        gradients = tape.gradient(losses[-1], trainable)
        for weight, gradient in zip(trainable, gradients, strict=True):
            weight.assign_sub(RATE * gradient)
    return np.average(losses, weights=[BATCH, BATCH, BATCH, 3]), found


@pytest.mark.parametrize("prefetch", [False, True])
def test_each_tower_normalizes_with_its_own_rows(prefetch):
    """Moving statistics are weighted by the numbers of the rows."""
    model = normalised()
    loss, wanted = trained_by_hand(model)
    with strategy_of(TOWERS, prefetch, batch_norm="tower"):
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        history = model.fit(X, Y, **options).history
        assert_all_close(model.get_weights(), wanted, 1e-5)
    assert_close(history["loss"], [loss], 1e-5)
    assert_all_close(model.weights, wanted, 1e-5)
