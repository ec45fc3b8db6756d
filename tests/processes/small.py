"""A small model, its data, and what is asserted of it on every rank."""

import logging
import os

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from tests.kit.ranks import rank_here

RANK = rank_here()
# What the ranks train with: the same checks run over every transport.
Strategy = getattr(kt, os.environ.get("TESTED_STRATEGY", "HorovodStrategy"))
COUNT, SHORT = 50, 21
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(COUNT, 4)).astype("float32")
Y = GENERATOR.normal(size=(COUNT, 3)).astype("float32")
SPEC = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 3)))


def model(outputs=3, seed=0, **options):
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    built = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(8, "relu"),
            keras.layers.Dense(outputs),
        ]
    )
    built.compile("sgd", "mse", metrics=["mae"], **options)
    return built


def forget_seed():
    """As in a script that never sets one; there is no public way back."""
    from tensorflow.python.eager import context

    context.context()._seed = None


def gather(value):
    return Strategy()._config.peers.gather_objects(value)


def assert_equal_on_ranks(value):
    first, *others = gather(value)
    assert all(other == first for other in others), [first, *others]


def assert_same_model(one, other=None):
    assert_equal_on_ranks([w.tobytes() for w in one.get_weights()])
    if other is not None:
        for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def assert_same_history(one, other):
    assert one.history.keys() == other.history.keys()
    for key, values in other.history.items():
        np.testing.assert_allclose(one.history[key], values, rtol=2e-6)


def refused(*words):
    class Context:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            assert kind and issubclass(kind, kt.TowerError), (kind, error)
            for word in words:
                assert word in str(error), (word, str(error))
            return True

    return Context()


class Messages(logging.Handler):
    """What the package logs in a block."""

    def __enter__(self):
        self.texts = []
        logging.getLogger("keras_towers").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("keras_towers").removeHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())

    def have(self, words):
        return any(words in text for text in self.texts)
