"""Random layers on towers draw what they draw on one device.

Each of Keras's is tried in ``classes``; here are layers and steps of one's own,
and what else a draw depends on.
"""

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.training import X, Y, classifier, compiled, fit

TOLERANCE = 4e-6


class Noise(layers.Layer):
    """Adds draws of its own, each of which takes the input and a seed."""

    def __init__(self, *draws, seed=None):
        super().__init__()
        self.draws = draws
        self.seed = keras.random.SeedGenerator(3) if seed is None else seed

    def call(self, x):
        for draw in self.draws:
            # Small, as rounding is then.
            x = x + 0.1 * ops.cast(draw(x, self.seed), x.dtype)
        return x


def _rows(x):
    return ops.shape(x)[0]


class Always(layers.Dropout):
    """Drops in predictions too."""

    def call(self, x, training=None):
        return super().call(x, training=True)


def _normal(x, seed=None):
    return keras.random.normal(ops.shape(x), seed=seed)


def _drawing():
    keras.utils.set_random_seed(1)
    keras.random.normal(())  # Where draws without a seed come from.
    middle = [
        Noise(
            _normal,
            lambda x, s: keras.random.uniform((_rows(x), 1), seed=s),
            lambda x, s: keras.random.categorical(x, 7, seed=s),
            # Weights' noise, of as many rows as the towers have examples.
            lambda x, s: keras.random.normal((8, 7), seed=s)[:1],
        ),
        # With one seed for all of its draws, and without one.
        Noise(_normal, seed=5),
        Noise(lambda x, s: _normal(x)),
        layers.Dropout(0.3),
        layers.Dropout(0.2, noise_shape=(1, 7)),
        layers.Dropout(0.2, noise_shape=(None, 1)),
        Always(0.4, seed=1),
    ]
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(7), *middle, layers.Dense(3)]
    )


def _in_all_calls(model):
    keras.random.normal(())
    history = fit(model, validation_data=(X[:9], Y[:9]))
    scores = model.evaluate(X[:9], Y[:9], verbose=0)
    return history, scores, model.predict(X[:9], verbose=0)


def test_draws():
    assert_exact(
        compiled(_drawing, jit_compile=False),
        _in_all_calls,
        kt.ParameterServerTowerStrategy(2),
        tolerance=TOLERANCE,
    )


def _in_batches_of_few(model):
    for count in (1, 2, 5):
        model.train_on_batch(X[:count], Y[:count])
    return model.predict_on_batch(X[:5])


def _in_batches_of(size):
    def act(model):
        return model.fit(
            X[:48], Y[:48], batch_size=size, shuffle=False, verbose=0
        )

    return act


@pytest.mark.parametrize(
    ("options", "act", "strategy", "reference"),
    [
        pytest.param(
            {"steps_per_execution": 3},
            *(fit, {}, None),
            id="several steps",
            marks=pytest.mark.core,
        ),
        # Seeds go on in step, also on towers without an example.
        pytest.param(
            {"jit_compile": False},
            *(_in_batches_of_few, {}, None),
            id="few examples",
        ),
        # The global batch consists of the batches of the towers, in order.
        pytest.param(
            {"jit_compile": False},
            _in_batches_of(8),
            {"batches": "each"},
            _in_batches_of(24),
            id="each tower its batch",
        ),
    ],
)
def test_other_loops(options, act, strategy, reference):
    assert_exact(
        lambda: classifier(Always(0.4, seed=2), **options),
        act,
        kt.TowerStrategy(3, **strategy),
        reference,
    )


class DrawsLate(keras.Sequential):
    """Draws for the first time in its step, with a seed and without."""

    def train_step(self, data):
        x, y, *_ = data
        noise = keras.random.normal(tf.shape(x))
        return super().train_step((x + 0.1 * noise, y))


def _drawing_late():
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = DrawsLate([keras.Input((6,)), Always(0.4), layers.Dense(3)])
    model.compile(m.momentum(), m.cross_entropy(), jit_compile=False)
    return model


def test_a_first_draw_in_the_step():
    assert_exact(
        _drawing_late,
        fit,
        kt.TowerStrategy(3),
        tolerance=TOLERANCE,
    )
