"""Steps that compute again what they do not keep, as one device trains."""

import functools
import re

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.settings import ENV_DEVICE_MEMORY
from tests.kit.compare import assert_same_model
from tests.kit.sampling import sample_of

ROWS, LENGTH, WIDTH = 26, 24, 32
layers = keras.layers


class Scores(layers.Layer):
    """The products with the rows of a table."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


def transformer():
    """Attention, normalizations, dropout, and a table that is used twice."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    table = layers.Embedding(50, WIDTH)
    x = table(tokens)
    for _ in range(3):
        y = layers.MultiHeadAttention(4, WIDTH // 4, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(y))
        y = layers.Dense(2 * WIDTH, "gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(y))
    x = layers.GlobalAveragePooling1D()(Scores(table)(x))
    return keras.Model(tokens, layers.Dense(5)(x)), "int32", (LENGTH,)


def convolutional():
    """Convolutions, whose normalizations exchange in the forward pass."""
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same")(image)
    for _ in range(3):
        y = layers.ReLU()(layers.BatchNormalization()(x))
        x = x + layers.Conv2D(8, 3, padding="same", use_bias=False)(y)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(5)(x)), "float32", (8, 8, 3)


def recurrent():
    """Loops, each of which is one operation, between others."""
    series = keras.Input((LENGTH, 4))
    x = layers.LayerNormalization()(layers.Dense(WIDTH, "tanh")(series))
    x = layers.LSTM(WIDTH, return_sequences=True)(x)
    x = layers.Dropout(0.2)(layers.Dense(4 * WIDTH, "gelu")(x))
    x = layers.Dense(5)(layers.GRU(WIDTH)(layers.Dense(WIDTH, "gelu")(x)))
    return keras.Model(series, x), "float32", (LENGTH, 4)


MODELS = {f.__name__: f for f in (transformer, convolutional, recurrent)}


def train(build, strategy=None):
    """Train a model for two epochs; return it."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model, dtype, shape = build()
    generator = np.random.default_rng(4)
    x = generator.random((ROWS, *shape)) * 50
    x = x.astype(dtype) if dtype == "int32" else x.astype(dtype) / 50
    y = generator.integers(0, 5, ROWS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        loss,
        metrics=["accuracy"],
        jit_compile=False,
    )

    def fit():
        model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)

    if strategy is None:
        fit()
        return model
    with strategy:
        fit()
    return model


@functools.cache
def on_one_device(name):
    return train(MODELS[name])


# What else is done to weights, or to batches, while steps compute again.
WAYS = {
    "transformer": functools.partial(
        kt.TowerStrategy, weights="sharded", gather_bytes=2**14
    ),
    "convolutional": functools.partial(kt.TowerStrategy, updates="each"),
    "recurrent": functools.partial(kt.TowerStrategy, micro_batches=2),
}


@pytest.mark.parametrize("name", sample_of(MODELS, 3))
def test_weights_are_those_of_one_device(name, small_shards):
    strategy = WAYS[name](2, remat=True)
    found = train(MODELS[name], strategy)
    assert_same_model(found, on_one_device(name))
    said = re.search(
        r"computes (\d+) operations? again \((\d+)% of its work\)",
        strategy.describe(),
    )
    assert said, strategy.describe()
    assert int(said[1]) > 0
    assert 0 <= int(said[2]) < 60


@pytest.mark.alternate
def test_what_would_not_fit_is_computed_again(monkeypatch, capfd):
    def bytes_with(**options):
        strategy = kt.TowerStrategy(2, **options)
        train(transformer, strategy)
        return strategy.describe()

    monkeypatch.setenv(ENV_DEVICE_MEMORY, "64MB")
    assert " again (" not in bytes_with()
    monkeypatch.setenv(ENV_DEVICE_MEMORY, "1.6MB")
    assert " again (" in bytes_with()
    said = capfd.readouterr().err
    assert "computes" in said and "instead of keeping" in said, said
    monkeypatch.setenv(ENV_DEVICE_MEMORY, "1.2MB")
    with pytest.raises(TowerError, match="does not fit into memory"):
        bytes_with(remat=False, micro_batches=1)


@pytest.mark.alternate
@pytest.mark.parametrize("size", ["64MB", "1.5MB"])
def test_one_device_computes_again_only_where_it_has_to(size, monkeypatch):
    monkeypatch.setenv(ENV_DEVICE_MEMORY, size)
    strategy = kt.TowerStrategy(1)
    found = train(transformer, strategy)
    assert_same_model(found, on_one_device("transformer"))
    # Otherwise Keras runs the step.
    assert (" again (" in strategy.describe()) == (size == "1.5MB")


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 2.5, "yes", 1])
def test_other_values_are_refused(value):
    with pytest.raises(TowerError, match="remat"):
        kt.TowerStrategy(2, remat=value)
