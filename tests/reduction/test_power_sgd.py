"""PowerSGD: what its factors are, and what becomes of what they leave out."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction import power_sgd
from keras_towers.transport import SingleProcess
from tests.reduction.ranks import alone, on_ranks

GENERATOR = np.random.default_rng(0)


def normal(*shape):
    return GENERATOR.normal(size=shape).astype("float32")


def test_sums_of_low_rank_arrive_whole_and_alike():
    # The kernel of a convolution is a matrix of as many columns as filters.
    kernels = [normal(2, 3, 8, 2) @ normal(2, 60) for _ in range(3)]
    biases = [normal(60) for _ in kernels]
    exchange = [power_sgd(6) for _ in kernels]

    def rank(transport):
        rank = transport.rank
        given = [tf.constant(parts[rank]) for parts in (kernels, biases)]
        return exchange[rank](transport, given, "k")

    for _ in range(2):
        results, _ = on_ranks(3, rank)
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
    *_, nothing = power_sgd(4)(Counting(), tensors, "k")
    assert sent == [[40, 4], [30, 4], [40], [8, 8]]
    assert nothing.shape == (0, 40)


def test_steps_are_projections_that_begin_with_the_last_ones_factor():
    matrix = normal(50, 40)
    step = alone(power_sgd(3))
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
    with_it, without = (alone(power_sgd(4)) for _ in range(2))
    with_it(gradient), without(gradient)
    assert np.isnan(with_it(gradient * np.nan)).all()
    np.testing.assert_array_equal(with_it(gradient), without(gradient))


def test_nothing_is_lost_for_good():
    # No gradient at all, then none of the first rows.
    gradient = normal(64, 50)
    gradient[:8] = 0
    step = alone(power_sgd(4))
    step(tf.zeros_like(gradient))
    total = sum(step(tf.constant(gradient)).numpy() for _ in range(200))
    assert np.abs(step(tf.constant(gradient)) - gradient).max() > 1
    assert np.abs(total / 200 - gradient).max() < 0.2


def test_short_floats_are_summed_in_32_bits():
    short = tf.cast(normal(64, 2) @ normal(2, 50), tf.float16)
    total, wanted = (
        alone(power_sgd(2))(tf.cast(short, dtype))
        for dtype in (tf.float16, tf.float32)
    )
    assert total.dtype == tf.float16
    np.testing.assert_array_equal(total, tf.cast(wanted, tf.float16))


@pytest.mark.parametrize("rank", [0, 1.5, True])
def test_what_cannot_be(rank):
    with pytest.raises(TowerError, match="1 or more columns"):
        power_sgd(rank)
