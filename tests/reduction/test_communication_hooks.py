"""What arrives of gradients that travel in 16 bits, or as factors."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction.communication_hooks import (
    all_reduce,
    bf16_shards,
    error_feedback,
    fp16,
    fp16_shards,
    power_sgd,
)
from keras_towers.transport import SingleProcess
from tests.reduction.cases import assert_sums
from tests.reduction.ranks import alone, on_ranks, random_rows, summed

SHAPES = [(7, 3), (), (5,), (0, 4), (1, 1), (1000,)]
FORMS = [
    (all_reduce, 1e-6),
    (fp16, 4e-3),
    (fp16_shards, 2e-3),
    (bf16_shards, 2e-2),
]
ROUNDING = [form for form, _ in FORMS[1:]]


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, tf.float32), (2, tf.float64), (3, tf.float32)]
)
@pytest.mark.parametrize(("exchange", "tolerance"), FORMS)
def test_sums_of_all_ranks_alike(exchange, tolerance, size, dtype):
    rows = random_rows(size, SHAPES, dtype)
    assert_sums(summed(exchange, rows)[0], rows, tolerance)


@pytest.mark.parametrize(("size", "calls"), [(2, 1), (3, 2)])
@pytest.mark.parametrize(
    ("exchange", "dtype"),
    [(fp16_shards, tf.float16), (bf16_shards, tf.bfloat16)],
)
def test_sums_in_32_bits_are_rounded_once(exchange, dtype, size, calls):
    # The sum of two 6e4 is too large for float16, though each is not.
    rows = [
        tf.constant([[2.0**100, -0.0, np.nan, 6e4], [rank / 3, -1e-7, 1e4, 1]])
        for rank in range(size)
    ]
    results, keys = summed(exchange, [[row, tf.ones(2)] for row in rows])
    total = tf.add_n([tf.cast(tf.cast(r, dtype), tf.float32) for r in rows])
    wanted = tf.cast(tf.cast(total, dtype), tf.float32).numpy().tobytes()
    assert {result[0].numpy().tobytes() for result in results} == {wanted}
    # Two ranks need one exchange, which uses both directions of a link.
    assert len(set(keys)) == calls


def test_float16_is_summed_in_hardware_or_in_shards():
    # In float16, each 1 would be lost in the first sum.
    rows = [[[2048.0, 6e4, 1e6, np.nan]], *[[[1.0, 6e4, 1.0, 1.0]]] * 2]
    for engine, first in (True, 2048), (False, 2050):
        results, keys = summed(fp16, rows, sums_float16=engine)
        for (total,) in results:
            wanted = [first, np.inf, np.inf, np.nan]
            np.testing.assert_array_equal(total, wanted)
    assert keys == summed(fp16_shards, rows)[1]


@pytest.mark.parametrize("exchange", ROUNDING)
def test_16_bits_travel_as_they_are(exchange):
    values = [
        tf.cast([1.0009765625, 1.0078125, 3], dtype)
        for dtype in (tf.float16, tf.bfloat16)
    ]
    zeros = [tf.zeros_like(value) for value in values]
    for result in summed(exchange, [values, zeros])[0]:
        for value, total in zip(values, result, strict=True):
            np.testing.assert_array_equal(total, value, strict=True)


@pytest.mark.parametrize("exchange", [*ROUNDING, power_sgd()])
def test_integers_are_refused(exchange):
    with pytest.raises(TowerError, match="gradient 1 is int32"):
        exchange(SingleProcess(), [tf.ones(2), tf.constant([1])], "k")


def test_nothing_to_sum_and_shapes_that_are_not_known():
    for exchange, _ in FORMS:
        assert exchange(SingleProcess(), [], "k") == []
    step = alone(fp16_shards)
    step = step.get_concrete_function(tf.TensorSpec([None, 2], tf.float32))
    for shape in (3, 2), (0, 2):
        assert step(tf.ones(shape)).shape == shape


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
    assert lost(error_feedback(exchange, dtype)).max() < 0.02


def test_error_feedback_forgets_what_is_not_finite():
    run = alone(error_feedback(fp16_shards, tf.float16))
    assert np.isinf(run(tf.constant([1e6, 1.0]))[0])
    assert np.isnan(run(tf.constant([np.nan, 1.0]))[0])
    np.testing.assert_array_equal(run(tf.constant([2.0, 1.0])), [2, 1])


def test_error_feedback_of_another_model_under_the_same_key():
    exchange = error_feedback(fp16_shards, tf.float16)
    for shape in ([3], [2, 2], [3]):
        (result,) = exchange(SingleProcess(), [tf.ones(shape)], "k")
        assert result.shape == shape


# ---- PowerSGD: factors, and what becomes of what they leave out -------------


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
def test_a_rank_that_cannot_be_is_refused(rank):
    with pytest.raises(TowerError, match="1 or more columns"):
        power_sgd(rank)
