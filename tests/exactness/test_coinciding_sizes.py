"""Batches as long as an axis of the model, or a fraction of it.

A static batch size is a number like any other. So none may say that an axis has
examples: towers divide and exchange what they do for another batch.
``tests/partition/layout/test_layout_choice.py`` has single operations.
"""

import random
import re

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.weights import shards
from tests.kit.compare import assert_same_model
from tests.kit.sampling import SEED, sample_of

pytestmark = pytest.mark.alternate

L, ops = keras.layers, keras.ops


def _attention(units, length):
    given = keras.Input((length, units))
    x = given + L.Embedding(length, units)(ops.arange(length))
    attends = L.MultiHeadAttention(2, units // 2, dropout=0.1, seed=1)
    x = L.LayerNormalization()(x + attends(x, x, use_causal_mask=True))
    return keras.Model(given, L.GlobalAveragePooling1D()(x))


def _masked(units, length):
    """Attention and a recurrent layer, both of which leave padding out."""
    given = keras.Input((length, units))
    x = L.Masking()(given)
    x = x + L.Attention(use_scale=True)([x, x], use_causal_mask=True)
    x = L.Bidirectional(L.GRU(units // 2, return_sequences=True))(x)
    return keras.Model(given, L.GlobalAveragePooling1D()(x))


def _stack(*layers):
    return lambda units, length: keras.Sequential(
        [keras.Input((length, units)), *(make(units) for make in layers)]
    )


# Of the number of units and of the length of a text.
MODELS = {
    "gru": _stack(
        lambda units: L.GRU(units, dropout=0.1, recurrent_dropout=0.1, seed=1)
    ),
    "attention": _attention,
    "masked": _masked,
    "convolutions": _stack(
        lambda units: L.Conv1D(units, 3, padding="same"),
        lambda units: L.BatchNormalization(),
        lambda units: L.TimeDistributed(L.Dense(units)),
        lambda units: L.Flatten(),
        L.Dense,
    ),
}


def _trained(name, examples, units, length, **options):
    """A model after a step; how towers exchange and what they compute once."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = MODELS[name](units, length)
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=(examples, length, units)).astype("float32")
    if name == "masked":
        x[::2, length // 2 :] = 0
    y = drawn.normal(size=(examples, units)).astype("float32")
    model(x[:2])
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    if not options:
        model.fit(x, y, batch_size=examples, verbose=0)
        return model, []
    with kt.TowerStrategy(**options) as strategy:
        model.fit(x, y, batch_size=examples, verbose=0)
    lines = strategy.describe().splitlines()
    return model, [re.sub(".*: ", "", s) for s in lines if "training of" in s]


@pytest.mark.parametrize("name", sample_of(MODELS, 4))
def test_a_batch_as_long_as_an_axis(name, monkeypatch):
    # Fewer zeros would be a constant, and of more units rows are gathered.
    draw, units = random.Random(f"{name} {SEED}"), 32
    examples = draw.choice([2 * units, units, units // 2])
    length = draw.choice([examples, 4])
    options = draw.choice([{}, {"weights": "sharded"}])
    monkeypatch.setattr(shards, "SMALLEST_BYTES", 1)
    found, lines = _trained(name, examples, units, length, towers=2, **options)
    assert_same_model(found, _trained(name, examples, units, length)[0])
    # Another batch, of which no other axis is a multiple.
    more = examples + 1
    _, others = _trained(name, more, units, length, towers=2, **options)
    if options:
        # A layer in shards takes the rows of all examples.
        lines, others = (
            [line.rpartition(",")[0] for line in each[:1]]
            for each in (lines, others)
        )
    assert lines == others
    assert len(lines) == 1, lines
