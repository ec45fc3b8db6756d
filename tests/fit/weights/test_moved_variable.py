"""What users hold from before a block, or from within it, has the value."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import moved_variable
from tests.kit.training import X, Y, classifier, fit

pytestmark = pytest.mark.usefixtures("small_shards")


def sharded():
    return kt.TowerStrategy(2, weights="sharded")


def on_another_device():
    return kt.ParameterServerTowerStrategy(2, ps_device="towers")


class Held:
    """What a user holds of a weight since before a block.

    Attributes:
        weight: the variable of Keras.
        value: its ``tf.Variable``.
        read: a function that was traced before, and read it.
        add: one that added 1.
        total: a function of a variable as its argument.
    """

    def __init__(self, model):
        self.weight = model.trainable_variables[2]
        self.value = value = self.weight.value
        self.read = tf.function(
            lambda: tf.reduce_sum(value * value)
        ).get_concrete_function()
        self.add = tf.function(
            lambda: value.assign_add(tf.ones_like(value)).dtype.size
        ).get_concrete_function()
        self.total = tf.function(lambda v: tf.reduce_sum(v * v))
        self.total(value)
        self.key = value.ref()

    def check(self):
        """All that reads or writes it agrees with the weight."""
        value, weight = self.value, self.weight
        now = weight.numpy()
        total = pytest.approx(np.sum(now * now), rel=1e-5)
        assert now.size
        assert value.numpy().tolist() == now.tolist()
        assert (value[:1] + 0).numpy().tolist() == now[:1].tolist()
        assert value.shape == now.shape and value.ref() == self.key
        assert float(self.read()) == total
        assert float(self.total(value)) == total
        assert float(self.total(weight.value)) == total
        in_thread = []
        thread = threading.Thread(
            target=lambda: in_thread.extend(
                [float(self.read()), float(self.total(value))]
            )
        )
        thread.start()
        thread.join()
        assert in_thread == [total, total]
        for read in (self.read, lambda: self.total(value)):
            for source in (value, weight.value):
                with tf.GradientTape() as tape:
                    result = read()
                (gradient,) = tape.gradient(result, [source])
                assert np.allclose(gradient, 2 * now)

    def check_writes(self, folder):
        """What is written through it is the weight's."""
        value, weight = self.value, self.weight
        now = weight.numpy()
        checkpoint = tf.train.Checkpoint(value=value)
        path = checkpoint.write(str(folder / "value"))
        self.add()
        self.check()
        assert np.allclose(weight, now + 1)
        value.assign(value + 1)
        assert np.allclose(weight, now + 2)
        for same in (value, weight, weight.value):
            value.assign(same)
            weight.value.assign(same)
            assert np.allclose(weight, now + 2)
        assign = tf.function(lambda: weight.value.assign(value).dtype.size)
        assign()
        assert np.allclose(weight, now + 2)
        checkpoint.read(path).assert_consumed()
        assert weight.numpy().tolist() == now.tolist()
        self.check()


@pytest.mark.parametrize("make", [sharded, on_another_device])
def test_what_is_held_from_before_a_block(make, tmp_path):
    model = classifier()
    held = Held(model)
    other = keras.Sequential([keras.Input(X.shape[1:]), model.layers[0]])
    expected = other.predict(X, verbose=0)
    weights = model.get_weights()
    with make():
        fit(model, epochs=0)
        held.check()
        model.set_weights(weights)
        assert np.allclose(other.predict_on_batch(X), expected, atol=1e-6)
        fit(model)
        assert held.weight.value is not held.value
        held.check()
        held.check_writes(tmp_path)
        inside = held.weight.value
        fit(model)
        held.check()
        assert inside.numpy().tolist() == held.weight.numpy().tolist()
    assert held.weight.value is held.value
    assert type(held.value) is type(tf.Variable(0.0))
    for _ in range(2):
        held.check()
        assert inside.numpy().tolist() == held.weight.numpy().tolist()
        assert held.total(inside) == held.read()
        inside.assign_add(tf.ones_like(inside))
    held.check_writes(tmp_path)
    del inside
    assert not moved_variable._by_handle


@pytest.mark.parametrize("when", ["before the weights are placed", "after"])
def test_a_function_traced_in_the_block(when):
    model = classifier()
    weight = model.trainable_variables[2]

    @tf.function
    def total():
        return tf.reduce_sum(tf.abs(weight))

    @tf.function
    def write():
        weight.assign(tf.ones_like(weight))

    def check():
        expected = np.sum(np.abs(weight.numpy()))
        assert float(total()) == pytest.approx(expected, rel=1e-5)

    with sharded():
        if when == "after":
            fit(model)
        check()
        traced = total.get_concrete_function(), write.get_concrete_function()
        fit(model)
        check()
        assert traced[0]() == total()
    check()
    before = weight.numpy()
    if when == "after":
        for function in traced:
            with pytest.raises(tf.errors.InvalidArgumentError, match="shards"):
                function()
    else:
        check()
    assert weight.numpy().tolist() == before.tolist()


def test_other_models_may_train_a_layer_that_is_in_shards():
    """One of plain Keras in another thread, which had its function before."""
    model = classifier()
    other = keras.Sequential([model.layers[0], keras.layers.Dense(1)])
    other.compile(keras.optimizers.SGD(0.1), "mse")
    other.train_on_batch(X, np.zeros(len(X)))
    with sharded():
        fit(model)
        before = model.get_weights()[0]
        losses = []
        thread = threading.Thread(
            target=lambda: losses.extend(
                other.train_on_batch(X, np.zeros(len(X))) for _ in range(20)
            )
        )
        thread.start()
        thread.join()
        assert losses[-1] < losses[0]
        assert not np.allclose(model.get_weights()[0], before)
        fit(model)
    fit(model, y=Y)
