"""Parts of a batch with different numbers of rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.fit.step.acts import sparse
from tests.kit.compare import assert_exact
from tests.kit.training import X, Y


class SemiSupervised(keras.Sequential):
    """Trains on labelled and unlabelled examples together."""

    def train_step(self, data):
        (x, y), more = data
        with tf.GradientTape() as tape:
            loss = sparse(y, self(x, training=True))
            loss += 0.1 * tf.reduce_mean(self(more, training=True) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"mine": loss}


def make(cls=SemiSupervised):
    model = cls(m.mlp().layers)
    model.compile(keras.optimizers.SGD(0.005))
    return model


def of_sizes(few, many, static):
    """Batches of two parts."""
    labelled = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24]))
    rest = tf.data.Dataset.from_tensor_slices(X[:48])
    return tf.data.Dataset.zip(
        labelled.batch(few, drop_remainder=static),
        rest.batch(many, drop_remainder=static),
    )


def test_towers_get_what_has_other_rows_as_a_whole():
    data = of_sizes(6, 9, static=True)
    assert_exact(
        make,
        lambda model: model.fit(data, epochs=2, verbose=0),
        kt.TowerStrategy(2),
        tolerance=5e-6,
    )


@pytest.mark.parametrize("static", [True, False])
def test_a_table_beside_the_examples(static):
    table = np.ones((5, 6), "float32")
    data = tf.data.Dataset.from_tensor_slices((X[:48], Y[:48]))
    data = data.batch(16, drop_remainder=static)
    data = data.map(lambda x, y: ((x, y), tf.constant(table)))
    assert_exact(
        make,
        lambda model: model.fit(data, verbose=0),
        kt.TowerStrategy(2),
        tolerance=5e-6,
    )


def test_other_rows_that_only_the_step_knows_are_refused():
    model = make()
    before = model.get_weights()
    data = of_sizes(7, 14, static=False)
    with (
        pytest.raises(kt.TowerError, match=r"x\[0\] has 7.*y has 14"),
        kt.TowerStrategy(2),
    ):
        model.fit(data, verbose=0)
    np.testing.assert_equal(model.get_weights(), before)
    model.fit(data, verbose=0)


def test_predictions_of_parts_with_other_rows():
    class Patches(keras.layers.Layer):
        def call(self, x):
            return tf.reshape(x, [-1, 3])

    inputs = keras.Input((6,))
    model = keras.Model(inputs, Patches()(inputs))
    wanted = model.predict(X[:10], batch_size=4, verbose=0)
    with kt.TowerStrategy(3):
        found = model.predict(X[:10], batch_size=4, verbose=0)
    np.testing.assert_array_equal(found, wanted)
