"""Assertions that hold wherever batches are copied ahead of the step."""

import time

import keras
import numpy as np
import tensorflow as tf

from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import assert_exact


def assert_strings_are_exact(strategy, **kwargs):
    """Strings beside numbers, which no accelerator can hold."""
    words = np.array(["a", "b", "c", "b", "a"] * 4)

    def make():
        keras.utils.set_random_seed(1)
        text = keras.Input((), dtype="string", name="text")
        numbers = keras.Input((6,), name="numbers")
        lookup = keras.layers.StringLookup(
            vocabulary=["a", "b", "c"], output_mode="one_hot"
        )
        both = keras.layers.Concatenate()([lookup(text), numbers])
        model = keras.Model([text, numbers], keras.layers.Dense(3)(both))
        model.compile(m.momentum(), m.cross_entropy())
        return model

    def act(model):
        dataset = tf.data.Dataset.from_tensor_slices(
            ({"text": words, "numbers": m.FEATURES[:20]}, m.LABELS[:20])
        )
        return model.fit(dataset.batch(7), verbose=0, shuffle=False)

    assert_exact(make, act, strategy, **kwargs)


def assert_drawn_ahead(strategy):
    """The next batch is drawn while this one computes."""
    drawn, computed = [], []

    def rows():
        for number in range(8):
            drawn.append(number)
            yield np.full((8, 1), number, "float32"), np.zeros((8, 1))

    row = tf.TensorSpec((8, 1), tf.float32)
    dataset = tf.data.Dataset.from_generator(rows, output_signature=(row, row))

    class Step(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            # With no step running, what is drawn now is drawn ahead.
            patience = time.monotonic() + 60
            while batch == 1 and len(drawn) < 3 and time.monotonic() < patience:
                time.sleep(0.01)
            computed.append(len(drawn))

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with strategy:
        model.fit(dataset, verbose=0, shuffle=False, callbacks=[Step()])
    # The first step has its batch and at least one more was drawn ahead.
    assert computed[1] >= 3
    assert drawn == list(range(8))
