"""Asynchronous towers: errors surface, and leave a model that trains on."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.leaving import Boom
from tests.kit.ordinary import Originals, assert_ordinary
from tests.kit.training import BATCH, STEPS, X, Y, classifier, fit
from tests.strategies.async_cases import SameShape

BAD = 1000.0


class Refuses(keras.layers.Layer):
    """Fails on a tower that is given a certain value."""

    def call(self, inputs):
        check = tf.debugging.assert_less(inputs, BAD, message="too large")
        with tf.control_dependencies([check]):
            return tf.identity(inputs)


class Breaks(SameShape):
    """Raises an error of Python on a tower that is given a certain value."""

    def call(self, inputs):
        def check(values):
            if np.any(values.numpy() >= BAD):
                raise Boom("too large")
            return values

        outputs = tf.py_function(check, [inputs], inputs.dtype)
        return tf.ensure_shape(outputs, inputs.shape)


class Fails(SameShape):
    """Cannot be traced on one of the towers."""

    def call(self, inputs):
        if "CPU:1" in tf.identity(inputs).device:
            raise Boom("only on tower 1")
        return inputs


def checked(layer):
    """A classifier that looks at its inputs first."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3)])
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def some_bad(at):
    x = X.copy()
    x[at * BATCH] = BAD
    return x


@pytest.mark.parametrize("layer", [Refuses, Breaks])
def test_an_error_on_a_tower_is_raised_by_fit(layer):
    model = checked(layer())
    originals = Originals(model)
    # Behind the last step of all, nobody hands out a batch and looks.
    for at, epochs in ((0, 3), (STEPS - 1, 1)):
        begin = int(model.optimizer.iterations)
        with kt.AsyncTowerStrategy(3):
            with pytest.raises(tf.errors.OpError, match="too large"):
                fit(model, x=some_bad(at), epochs=epochs)
            before = int(model.optimizer.iterations)
            assert before <= begin + STEPS
            fit(model)
            assert int(model.optimizer.iterations) == before + STEPS
        originals.assert_back()
        assert_ordinary(model)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    fit(model)


def test_an_error_while_tracing():
    model = checked(Fails())
    originals = Originals(model)
    with pytest.raises(Boom), kt.AsyncTowerStrategy(3):
        fit(model)
    originals.assert_back()
    assert_ordinary(model)
    fit(model)


def test_an_error_in_the_data():
    def broken():
        yield X[:8], Y[:8]
        yield X[8:16], Y[8:16]
        raise Boom("no more data")

    model = classifier()
    with (
        kt.AsyncTowerStrategy(3),
        pytest.raises(tf.errors.OpError, match="no more data"),
    ):
        model.fit(broken(), verbose=0)
    assert_ordinary(model)
    assert int(model.optimizer.iterations) == 2
