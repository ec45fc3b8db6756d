"""What few scripts do, and one device allows: equal, or told."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.training import compiled

X, Y = m.FEATURES[:13], m.LABELS[:13]
Dense = keras.layers.Dense


def _decaying():
    # It changes weights also where there is no gradient.
    return keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2)


def test_batches_without_examples():
    def batches():
        for size in (4, 0, 3, 0):
            yield X[:size], Y[:size]

    def act(model):
        spec = tuple(
            tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (X, Y)
        )
        data = tf.data.Dataset.from_generator(batches, output_signature=spec)
        return model.fit(data, epochs=2, verbose=0).history

    # One device does without running eagerly, where its loss is no number.
    make, towers = compiled(optimizer=_decaying), kt.TowerStrategy(3)
    assert_exact(make, act, towers, tolerance=1e-5, in_graph=True)


class AddsRows(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.01 * tf.reduce_sum(inputs**2, -1))
        return inputs


def test_a_vector_given_to_add_loss(logged):
    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [keras.Input((6,)), Dense(4), AddsRows(), Dense(3)]
        )

    def act(model):
        # Parts of different sizes, and one that borrows an example.
        fit = model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
        return fit.history

    assert_exact(compiled(build), act, kt.TowerStrategy(2))
    assert not logged("step of")


def test_compiled_anew_while_it_is_fitted(logged):
    class Unfreeze(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.model.layers[0].trainable = True
                self.model.compile(m.momentum(), m.cross_entropy())
                self.model.make_train_function()

    def build():
        model = m.mlp()
        model.layers[0].trainable = False
        return model

    def act(model):
        # The last batch has no example for one of the towers.
        return model.fit(
            *(X, Y),
            batch_size=6,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[Unfreeze()],
        ).history

    assert_exact(compiled(build), act, kt.TowerStrategy(2))
    assert not logged("step of")


class Bank(keras.layers.Layer):
    """Keeps a row in a variable, by a method of TensorFlow's variables."""

    def __init__(self, row_of):
        super().__init__()
        self.row_of = row_of

    def build(self, shape):
        self.rows = self.add_weight(
            shape=(4, shape[-1]), initializer="zeros", trainable=False
        )

    def call(self, inputs):
        row = self.row_of(inputs)[tf.newaxis]
        self.rows.value.scatter_update(tf.IndexedSlices(row, [1]))
        return inputs + tf.reduce_mean(self.rows.value)


@pytest.mark.parametrize("same", [True, False])
def test_rows_of_a_variable(same, logged):
    def row_of(inputs):
        return tf.ones(inputs.shape[1:]) if same else tf.reduce_mean(inputs, 0)

    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((6,)), Bank(row_of), Dense(3)])

    def act(model):
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)

    if same:
        assert_exact(compiled(build), act, kt.TowerStrategy(2))
        assert not logged("step of")
        return
    with kt.TowerStrategy(2):
        act(compiled(build)())
    (_, said), *_ = logged("step of")
    assert "writes rows of a variable that follow from the batch" in said
    assert "test_unusual.py" in said


def test_rows_of_a_variable_outside_of_the_towers():
    model = compiled()()
    rows = tf.IndexedSlices(tf.ones((1, 7)), [1])
    with kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
        wanted = model.get_weights()[0]
        model.weights[0].value.scatter_update(rows)
        (total, *_) = model.metrics[0].variables
        with pytest.raises(kt.TowerError, match="assign its whole value"):
            total.value.scatter_update(tf.IndexedSlices(tf.ones(1), [0]))
    wanted[1] = 1
    np.testing.assert_array_equal(model.get_weights()[0], wanted)


def test_steps_that_overflow(logged):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled()()
    finally:
        keras.config.set_dtype_policy("float32")
    with kt.TowerStrategy(2, exact=True) as strategy:
        model.fit(X[:12], Y[:12], batch_size=6, verbose=0)
    ((_, said),) = logged("step of")
    assert "may differ: whether gradients overflow in float16" in said
    assert "mixed_bfloat16" in said
    assert "not proven" in strategy.describe()


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
@pytest.mark.parametrize("fitted", [False, True])
def test_a_step_of_the_users_own_outside_of_the_towers(wrap, fitted):
    model = compiled()()
    model.optimizer.build(model.trainable_variables)

    @wrap
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    with kt.TowerStrategy(2):
        if fitted:
            model.fit(X, Y, verbose=0)
        before = [np.array(w) for w in model.get_weights()]
        with pytest.raises(kt.TowerError, match=r"outside of the towers.*run"):
            step(X, Y)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    step(X, Y)
