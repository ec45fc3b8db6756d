"""Hooks that keep what they have not sent, or factors, for the next step."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.reduction.compression_hooks import (
    bf16_shards,
    fp16,
    fp16_shards,
)
from keras_towers.reduction.stateful_hooks import ErrorFeedback, PowerSGD
from keras_towers.transport import SingleProcess
from tests.reduction.ranks import alone, on_ranks


@pytest.mark.parametrize(
    ("exchange", "dtype", "bits"),
    [(fp16, tf.float16, 10), (bf16_shards, tf.bfloat16, 7)],
)
def test_error_feedback_makes_up_for_rounding(exchange, dtype, bits):
    # A third of the way between two numbers of the short format.
    value = tf.constant([1 + 2.0**-bits / 3] * 3)

    def lost(exchange):
        step = alone(exchange)
        return np.abs(sum(step(value) - value for _ in range(300)))

    assert lost(exchange).min() > 0.05
    assert lost(ErrorFeedback(exchange, dtype)).max() < 0.02


def test_error_feedback_forgets_what_is_not_finite():
    run = alone(ErrorFeedback(fp16_shards, tf.float16))
    assert np.isinf(run(tf.constant([1e6, 1.0]))[0])
    assert np.isnan(run(tf.constant([np.nan, 1.0]))[0])
    np.testing.assert_array_equal(run(tf.constant([2.0, 1.0])), [2, 1])


# ---- PowerSGD: factors, and what becomes of what they leave out -------------


GENERATOR = np.random.default_rng(0)


def normal(*shape):
    return GENERATOR.normal(size=shape).astype("float32")


def test_sums_of_low_rank_arrive_whole_and_alike():
    # The kernel of a convolution is a matrix of as many columns as filters.
    kernels = [normal(2, 3, 8, 2) @ normal(2, 60) for _ in range(3)]
    biases = [normal(60) for _ in kernels]
    hook = PowerSGD(6)

    def rank(transport):
        rank = transport.rank
        given = [tf.constant(parts[rank]) for parts in (kernels, biases)]
        first, state = hook.sum(transport, given, hook.init(given), "k")
        second, _ = hook.sum(transport, given, state, "k")
        return first, second

    for results in zip(*on_ranks(3, rank)[0], strict=True):
        for result in results:
            np.testing.assert_allclose(result[0], sum(kernels), atol=1e-4)
            np.testing.assert_array_equal(result[1], tf.add_n(biases))
            np.testing.assert_array_equal(result[0], results[0][0])


def test_only_factors_are_sent_of_large_matrices():
    sent = []

    class Counting(SingleProcess):
        def all_reduce(self, tensors, key):
            sent.extend(tensor.shape.as_list() for tensor in tensors)
            return list(tensors)

    given = [normal(40, 30), normal(40), normal(8, 8), normal(0, 40)]
    tensors = [*map(tf.constant, given)]
    hook = PowerSGD(4)
    (*_, nothing), _ = hook.sum(Counting(), tensors, hook.init(tensors), "k")
    assert sent == [[40, 4], [30, 4], [40], [8, 8]]
    assert nothing.shape == (0, 40)


def test_steps_are_projections_that_begin_with_the_last_ones_factor():
    matrix = normal(50, 40)
    step = alone(PowerSGD(3))
    first = step(tf.constant(matrix)).numpy()
    assert np.linalg.matrix_rank(first, 1e-3) == 3
    np.testing.assert_allclose(first.T @ (matrix - first), 0, atol=1e-3)
    # What was left out comes again, and the rows of the last one show where.
    wanted = 2 * matrix - first
    *_, rows = np.linalg.svd(first)
    basis, _ = np.linalg.qr(wanted @ rows[:3].T)
    second = step(tf.constant(matrix))
    np.testing.assert_allclose(second, basis @ basis.T @ wanted, atol=1e-3)


def test_a_step_that_overflows_leaves_no_trace():
    gradient = tf.constant(normal(64, 50))
    with_it, without = (alone(PowerSGD(4)) for _ in range(2))
    with_it(gradient), without(gradient)
    assert np.isnan(with_it(gradient * np.nan)).all()
    np.testing.assert_array_equal(with_it(gradient), without(gradient))


def test_nothing_is_lost_for_good():
    # No gradient at all, then none of the first rows.
    gradient = normal(64, 50)
    gradient[:8] = 0
    step = alone(PowerSGD(4))
    step(tf.zeros_like(gradient))
    total = sum(step(tf.constant(gradient)).numpy() for _ in range(200))
    assert np.abs(step(tf.constant(gradient)) - gradient).max() > 1
    assert np.abs(total / 200 - gradient).max() < 0.2


def test_short_floats_are_summed_in_32_bits():
    short = tf.cast(normal(64, 2) @ normal(2, 50), tf.float16)
    total, wanted = (
        alone(PowerSGD(2))(tf.cast(short, dtype))
        for dtype in (tf.float16, tf.float32)
    )
    assert total.dtype == tf.float16
    np.testing.assert_array_equal(total, tf.cast(wanted, tf.float16))


@pytest.mark.parametrize("rank", [0, 1.5, True])
def test_a_rank_that_cannot_be_is_refused(rank):
    with pytest.raises(TowerError, match="1 or more columns"):
        PowerSGD(rank)


def test_integers_are_refused():
    with pytest.raises(TowerError, match="gradient 1 is int32"):
        PowerSGD().init([tf.ones(2), tf.constant([1])])
