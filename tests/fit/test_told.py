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
        ({}, WORDS),
        ({"random": "global"}, {"statistics"}),
        ({"batch_norm": "global"}, {"random layers"}),
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


def test_draws_by_a_constant_seed(said):
    class Noisy(layers.Layer):
        def call(self, x):
            noise = tf.random.stateless_poisson
            return x + noise(tf.shape(x), [1, 2], tf.ones_like(x), tf.float32)

    model = linear(Noisy())
    with kt.TowerStrategy(2):
        model.train_on_batch(X[:8], Y[:8])
    assert any("random layers draw" in line for line in said)
