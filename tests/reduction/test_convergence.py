"""Digits are learned as well with gradients that lose something on the way."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from keras_towers.reduction import compression
from tests.reduction.ranks import on_ranks

RANKS = 2
WIDTHS = (64, 48, 10)


@functools.cache
def trained(name):
    """Train on two ranks, each with half of every batch; accuracy of rank 0."""
    digits = load_digits()
    x, y = tf.constant(digits.data / 16, tf.float32), tf.constant(digits.target)

    def logits(weights, x):
        return tf.nn.relu(x @ weights[0]) @ weights[1]

    def train(transport):
        exchange = compression.resolve(name)
        draws = np.random.default_rng(0)
        weights = [
            tf.constant(draws.normal(size=size) / 8, tf.float32)
            for size in zip(WIDTHS, WIDTHS[1:], strict=False)
        ]
        for _ in range(80):
            rows = draws.integers(1200, size=128)[transport.rank :: RANKS]
            with tf.GradientTape() as tape:
                tape.watch(weights)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    tf.gather(y, rows), logits(weights, tf.gather(x, rows))
                )
                loss = tf.reduce_mean(losses) / RANKS
            sums = exchange(transport, tape.gradient(loss, weights), "k")
            weights = [w - 0.5 * g for w, g in zip(weights, sums, strict=True)]
        found = tf.argmax(logits(weights, x[1200:]), 1)
        return float(np.mean(found == y[1200:])), *map(np.array, weights)

    results, _ = on_ranks(RANKS, train)
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(other, one)
    return results[0][0]


# Of one step and the next, the tests of error feedback and PowerSGD show it.
@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["fp16-feedback", "bf16-feedback", "power-sgd"]
)
def test_digits(name):
    assert trained("none") > 0.85
    assert trained(name) > trained("none") - 0.03
