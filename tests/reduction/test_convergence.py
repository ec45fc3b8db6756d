"""Digits are learned as well with gradients that lose something on the way."""

import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from keras_towers.reduction import compression
from tests.reduction.ranks import on_ranks

# Of one step and the next, the tests of error feedback and PowerSGD show it.
pytestmark = pytest.mark.long

RANKS = 2
STEPS = 80
RATE = 0.5
WIDTHS = (64, 48, 10)


def trained(name):
    """Train on two ranks, each with half of every batch; accuracy of rank 0."""
    digits = load_digits()
    x = tf.constant(digits.data / 16, tf.float32)
    y = tf.constant(digits.target)

    def train(transport):
        exchange = compression.resolve(name)
        draws = np.random.default_rng(0)
        weights = [
            tf.constant(draws.normal(size=size) / 8, tf.float32)
            for size in zip(WIDTHS, WIDTHS[1:], strict=False)
        ]

        def logits(weights, x):
            return tf.nn.relu(x @ weights[0]) @ weights[1]

        for _ in range(STEPS):
            rows = draws.integers(1200, size=128)[transport.rank :: RANKS]
            with tf.GradientTape() as tape:
                tape.watch(weights)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    tf.gather(y, rows), logits(weights, tf.gather(x, rows))
                )
                loss = tf.reduce_mean(losses) / RANKS
            sums = exchange(transport, tape.gradient(loss, weights), "k")
            weights = [w - RATE * g for w, g in zip(weights, sums, strict=True)]
        found = tf.argmax(logits(weights, x[1200:]), 1)
        right = float(np.mean(found == y[1200:]))
        return right, [w.numpy().tobytes() for w in weights]

    (first, *others), _ = on_ranks(RANKS, train)
    assert all(other == first for other in others), "the ranks differ"
    return first[0]


@pytest.fixture(scope="module")
def exact():
    return trained("none")


@pytest.mark.parametrize(
    "name", ["fp16-feedback", "bf16-feedback", "power-sgd"]
)
def test_digits(name, exact):
    assert exact > 0.85
    assert trained(name) > exact - 0.03
