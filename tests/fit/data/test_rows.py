"""Parts of a batch with different numbers of rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.fit.step.written import sparse
from tests.kit.compare import assert_exact
from tests.kit.long import long_but
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


def make():
    model = SemiSupervised(m.mlp().layers)
    model.compile(keras.optimizers.SGD(0.005))
    return model


def zipped(labelled, unlabelled, drop_remainder=False):
    few = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24]))
    many = tf.data.Dataset.from_tensor_slices(X[:48])
    return tf.data.Dataset.zip(
        few.batch(labelled, drop_remainder), many.batch(unlabelled)
    )


STRATEGIES = {
    "towers": lambda: kt.TowerStrategy(3),
    "servers": lambda: kt.ParameterServerTowerStrategy(2),
}


@pytest.mark.parametrize(
    "strategy, sizes, static",
    long_but(
        lambda case: case[0] == "servers" or case[1] == (7, 14),
        [
            ("towers", (8, 16), True),
            ("towers", (6, 9), True),
            ("towers", (7, 14), True),
            ("towers", (3, 12), True),
            ("towers", (6, 9), False),
            ("towers", (7, 14), False),
            ("servers", (3, 12), False),
        ],
    ),
)
def test_each_part_is_split_by_its_own_rows(strategy, sizes, static, caplog):
    def act(model):
        data = zipped(*sizes).take(24 // sizes[0])
        if static:
            data = data.map(
                lambda few, many: (
                    tuple(
                        tf.ensure_shape(t, [sizes[0], *t.shape[1:]])
                        for t in few
                    ),
                    tf.ensure_shape(many, [sizes[1], *many.shape[1:]]),
                )
            )
        return model.fit(data, epochs=2, verbose=0)

    assert_exact(make, act, STRATEGIES[strategy](), tolerance=5e-6)
    warnings = [r for r in caplog.records if "numbers of rows" in r.message]
    assert len(warnings) == 1
    assert f"x[0] has {sizes[0]}" in warnings[0].message


@pytest.mark.parametrize("static", [True, False])
def test_what_cannot_be_divided_alike_is_refused(static):
    table = np.zeros((5, 6), "float32")
    model = make()
    before = model.get_weights() if model.built else None
    data = tf.data.Dataset.from_tensor_slices((X[:48], Y[:48]))
    data = data.batch(16, drop_remainder=static)
    data = data.map(lambda x, y: ((x, y), tf.constant(table)))
    with (
        pytest.raises(kt.TowerError, match=r"x\[0\] has 16.*y has 5"),
        kt.TowerStrategy(2),
    ):
        model.fit(data, verbose=0)
    assert before is None or all(
        map(np.array_equal, model.get_weights(), before)
    )
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
        model = Averaging(m.mlp().layers)
        for name in ("few", "many"):
            variable = model.add_weight(shape=(), trainable=False, name=name)
            variable.assign(0.0)
            setattr(model, name, variable)
        model.compile(keras.optimizers.SGD(0.005))
        return model

    def act(model):
        for few, many in ((10, 5), (4, 8), (10, 5)):
            model.train_on_batch(((X[:few], Y[:few]), X[:many]))

    assert_exact(make_averaging, act, kt.TowerStrategy(2), tolerance=5e-6)
