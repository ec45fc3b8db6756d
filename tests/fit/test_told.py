"""Training says what does not train as on one device."""

import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers.fit import told
from tests.kit.training import X, Y, linear

WORDS = {"statistics", "random layers"}


@pytest.fixture
def said(monkeypatch):
    lines = []
    # Models of other tests may have had the same names.
    monkeypatch.setattr(told, "_said", set())
    monkeypatch.setattr(told, "announce", lines.append)
    return lines


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, {"statistics"}),
        ({"random": "tower"}, WORDS),
        ({"batch_norm": "global", "random": "tower"}, {"random layers"}),
        ({"exact": True}, set()),
        ({"batches": "each"}, set()),
    ],
)
def test_once_what_no_option_makes_equal(options, words, said):
    model = linear(layers.BatchNormalization(name="norm"), layers.Dropout(0.2))
    with kt.TowerStrategy(2, **options) as strategy:
        for _ in range(2):
            model.train_on_batch(X[:8], Y[:8])
    assert len(said) == (1 if words else 0)
    for line in said:
        assert {word for word in WORDS if word in line} == words
        assert model.name in line
        assert "exact=True" in line
        assert ("BatchNormalization (norm)" in line) == ("statistics" in words)
        # strategy.describe() says it, in the same words.
        _, _, why = line.partition("one device: ")
        assert f"proven to be that of one device, but for this: {why}" in (
            strategy.describe()
        )
    assert ("but for this" in strategy.describe()) == bool(words)


def test_nothing_where_nothing_differs(said):
    with kt.TowerStrategy(2):
        linear(layers.LayerNormalization()).train_on_batch(X[:8], Y[:8])
    assert not said


@tf.function
def in_a_function(x):
    def noise():
        return tf.random.normal(tf.shape(x))

    return tf.cond(x[0, 0] < 9, noise, lambda: x)


NOISE = {
    "poisson": lambda x: tf.random.stateless_poisson(
        tf.shape(x), [1, 2], tf.ones_like(x), tf.float32
    ),
    "uniform": lambda x: tf.random.stateless_uniform(tf.shape(x), [1, 2]),
    "generator": lambda x: GENERATOR.normal(tf.shape(x)),
    "function": in_a_function,
}
GENERATOR = tf.random.Generator.from_seed(1)


# TensorFlow makes constants of draws with a fixed seed.
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("noise", "compiled"),
    [
        ("poisson", {}),
        ("poisson", {"run_eagerly": True}),
        ("uniform", {"jit_compile": True}),
        ("uniform", {"run_eagerly": True}),
        ("generator", {}),
        ("function", {}),
    ],
)
def test_draws_of_any_kind(noise, compiled, said):
    class Noisy(layers.Layer):
        def call(self, x):
            return x + NOISE[noise](x)

    model = linear(Noisy(), **compiled)
    with kt.TowerStrategy(2, random="tower"):
        model.train_on_batch(X[:8], Y[:8])
    assert any("random layers draw" in line for line in said)
