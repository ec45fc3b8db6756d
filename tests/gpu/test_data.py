"""Batches that are copied to GPUs while these compute."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.exactness import models as m
from tests.fit.data.test_inputs import fitting
from tests.gpu.towers import TOLERANCE, strategy, towers
from tests.kit.compare import assert_exact
from tests.kit.training import compiled

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "source", ["numpy", "tf.data", "unknown length", "PyDataset", "generator"]
)
@pytest.mark.parametrize("batches", ["split", "each"])
def test_every_source(source, batches):
    more = 1 if batches == "split" else len(towers())
    steps = {"steps_per_epoch": 3} if source == "generator" else {}
    assert_exact(
        compiled(),
        fitting(source, 4, epochs=1, **steps),
        strategy(batches=batches),
        fitting(source, 4 * more, epochs=1, **steps),
        tolerance=TOLERANCE,
    )


def test_strings_stay_on_the_host():
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

    assert_exact(make, act, strategy(), tolerance=TOLERANCE)


def test_the_next_batch_is_drawn_while_this_one_computes():
    drawn, seen = [], []

    def rows():
        for number in range(8):
            drawn.append(number)
            yield np.full((8, 1), number, "float32"), np.zeros((8, 1))

    dataset = tf.data.Dataset.from_generator(
        rows,
        output_signature=(
            tf.TensorSpec((8, 1), tf.float32),
            tf.TensorSpec((8, 1), tf.float32),
        ),
    )

    class Step(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            until = time.monotonic() + 10
            while batch == 1 and len(drawn) < 3 and time.monotonic() < until:
                time.sleep(0.01)
            seen.append(len(drawn))

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with strategy():
        model.fit(dataset, verbose=0, shuffle=False, callbacks=[Step()])
    assert seen[1] >= 3
    assert drawn == list(range(8))
