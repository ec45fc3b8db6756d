"""Random layers on towers draw what they draw on one device.

Each of Keras's is tried in ``classes``, and what a layer of one's own may draw
in ``tests/fit/step/test_random.py``; here is what else a draw depends on.
"""

import keras
import tensorflow as tf

import keras_towers as kt
from keras_towers.conformance import case_models as m
from tests.kit.compare import assert_exact
from tests.kit.training import X, Y, classifier, fit


def test_the_batches_of_towers_are_one_batch():
    """Of one device, which has all towers' examples in order."""
    assert_exact(
        lambda: classifier(m.Always(0.4, seed=2), jit_compile=False),
        lambda model: fit(model, x=X[:48], y=Y[:48], batch_size=8),
        kt.TowerStrategy(3, batches="each"),
        lambda model: fit(model, x=X[:48], y=Y[:48], batch_size=24),
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
    layers = [keras.Input((6,)), m.Always(0.4), keras.layers.Dense(3)]
    model = DrawsLate(layers)
    model.compile(m.momentum(), m.cross_entropy(), jit_compile=False)
    return model


def test_a_first_draw_in_the_step():
    assert_exact(_drawing_late, fit, kt.TowerStrategy(3), tolerance=4e-6)
