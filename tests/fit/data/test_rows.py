"""Parts of a batch with different numbers of rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.data import batches
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


@pytest.mark.parametrize("sizes, static", [((6, 9), True), ((7, 14), False)])
def test_each_part_is_split_by_its_own_rows(sizes, static, caplog):
    few = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24]))
    many = tf.data.Dataset.from_tensor_slices(X[:48])
    data = tf.data.Dataset.zip(
        few.batch(sizes[0], drop_remainder=static),
        many.batch(sizes[1], drop_remainder=static),
    )

    def act(model):
        return model.fit(data, epochs=2, verbose=0)

    assert_exact(make, act, kt.TowerStrategy(2), tolerance=5e-6)
    warnings = [r for r in caplog.records if "numbers of rows" in r.message]
    assert len(warnings) == 1
    assert f"x[0] has {sizes[0]}" in warnings[0].message


@pytest.mark.parametrize("static", [True, False])
def test_what_cannot_be_divided_alike_is_refused(static):
    table = np.zeros((5, 6), "float32")
    model = make()
    before = model.get_weights()
    data = tf.data.Dataset.from_tensor_slices((X[:48], Y[:48]))
    data = data.batch(16, drop_remainder=static)
    data = data.map(lambda x, y: ((x, y), tf.constant(table)))
    with (
        pytest.raises(kt.TowerError, match=r"x\[0\] has 16.*y has 5"),
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


def test_written_state_is_weighted_by_what_towers_get():
    # Rows of 3 and 2 units: the first part has 6 and 4 of its rows.
    class Averaging(SemiSupervised):
        def train_step(self, data):
            (x, _), more = data[0]
            logs = super().train_step(data[0])
            for variable, part in ((self.few, x), (self.many, more)):
                variable.assign(0.5 * variable + tf.reduce_mean(part))
            return logs

    def make_averaging():
        model = make(Averaging)
        for name in ("few", "many"):
            variable = model.add_weight(shape=(), trainable=False, name=name)
            variable.assign(0.0)
            setattr(model, name, variable)
        return model

    def act(model):
        for few, many in ((10, 5), (4, 8), (10, 5)):
            model.train_on_batch(((X[:few], Y[:few]), X[:many]))

    strategy = kt.TowerStrategy(2)
    assert_exact(make_averaging, act, strategy, tolerance=5e-6)


def test_scalars_go_to_every_tower_and_count_once():
    batch = batches.split((tf.constant(3.0),), 2)
    assert [float(piece[0]) for piece in batch.pieces] == [3.0, 3.0]
    assert batch.counts.numpy().tolist() == [1, 0]
