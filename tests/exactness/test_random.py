"""Random layers on towers draw what they draw on one device.

Each of Keras's is tried in ``classes``, and what a layer of one's own may draw
in ``tests/fit/step/test_random.py``; here is what else a draw depends on.
"""

import keras
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.training import X, Y, classifier, fit

TOLERANCE = 4e-6


class Always(layers.Dropout):
    """Drops in predictions too."""

    def call(self, x, training=None):
        return super().call(x, training=True)


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
    assert_exact(_drawing_late, fit, kt.TowerStrategy(3), tolerance=TOLERANCE)
