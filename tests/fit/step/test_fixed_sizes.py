"""Steps that need static numbers of rows."""

import keras
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from tests.fit.step.acts import Acts
from tests.kit.compare import assert_exact
from tests.kit.training import X, Y, compiled

BATCH = 11


class Applied(Acts):
    """Any function of the inputs and a seed."""

    def __init__(self, function):
        super().__init__(lambda x: function(x, self.seed))
        self.seed = keras.random.SeedGenerator(3)

    def compute_output_shape(self, shape):
        return shape


def _noise_of(shape_of):
    return lambda x, seed: x + keras.random.normal(shape_of(x), seed=seed)


NEED_STATIC_ROWS = (
    _noise_of(lambda x: x.shape),
    _noise_of(lambda x: (x.shape[0], 1)),
    # One for all.
    _noise_of(lambda x: (1, 6 if x.shape[0] else 0)),
    lambda x, seed: (
        x + keras.random.normal((2 * x.shape[0], 6), seed=seed)[: x.shape[0]]
    ),
    lambda x, seed: x + tf.zeros(x.shape),
    lambda x, seed: x * tf.cast(tf.range(x.shape[0]) < 99, tf.float32)[:, None],
    # Used several times.
    lambda x, seed: tf.reshape(
        tf.reshape(x, (x.shape[0], 3, 2)) + tf.ones((x.shape[0], 1, 2)),
        (x.shape[0], 6),
    ),
)


def _making(*functions, **options):
    def build():
        keras.utils.set_random_seed(1)
        applied = *map(Applied, functions), layers.Dropout(0.4, seed=2)
        inputs = keras.Input(batch_shape=(BATCH, 6))
        return keras.Sequential([inputs, *applied, layers.Dense(3)])

    return compiled(build, **options)


def _fit(model):
    data = tf.data.Dataset.from_tensor_slices((X[:44], Y[:44]))
    data = data.batch(BATCH, drop_remainder=True)
    return model.fit(data, verbose=0, validation_data=data).history


def _other_methods(model):
    x, y = X[:BATCH], Y[:BATCH]
    logs = model.train_on_batch(x, y), model.test_on_batch(x, y)
    return logs, model.predict_on_batch(x), model.predict(x, BATCH, verbose=0)


@pytest.mark.parametrize(
    "act, towers, options",
    [(_fit, 3, {"steps_per_execution": 2}), (_other_methods, 2, {})],
)
def test_static_shapes(act, towers, options):
    make = _making(*NEED_STATIC_ROWS, **options)
    # One device counts executions in a graph only.
    assert_exact(make, act, kt.TowerStrategy(towers), in_graph=True)
