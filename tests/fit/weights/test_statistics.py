"""``batch_norm="tower"``: statistics of each tower's rows, as documented."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import close
from tests.kit.training import strategy_of

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
    with strategy_of(4, prefetch, batch_norm="tower"):
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
    model = normalised()
    kernel, bias = (v.numpy() for v in model.layers[-1].weights)
    with kt.TowerStrategy(2, batch_norm="tower"):
        loss = model.train_on_batch(X, Y)
    outputs = []
    for piece in pieces(X, 2):
        centred = (piece - piece.mean(0)) / np.sqrt(piece.var(0) + EPSILON)
        outputs.append(centred @ kernel + bias)
    wanted = m.cross_entropy()(Y, np.concatenate(outputs).astype("float32"))
    close(loss, wanted, 1e-5)
