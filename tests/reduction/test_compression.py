"""Gradients that travel in 16 bits: what arrives, and what rounding costs."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction import (
    GradientPacker,
    all_reduce,
    chain,
    error_feedback,
    pack,
)
from keras_towers.reduction.compression import (
    bf16_shards,
    fp16,
    fp16_shards,
)
from keras_towers.transport import SingleProcess
from tests.reduction.ranks import assert_sums, on_ranks, random_tensors

SHAPES = [(7, 3), (), (5,), (0, 4), (1, 1), (1000,)]
FORMS = [
    (all_reduce, 1e-6),
    (fp16, 4e-3),
    (fp16_shards, 2e-3),
    (bf16_shards, 2e-2),
]
ROUNDING = [form for form, _ in FORMS[1:]]


def summed(size, exchange, tensors_of):
    return on_ranks(
        size,
        lambda transport: exchange(transport, tensors_of(transport.rank), "k"),
    )[0]


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, tf.float32), (2, tf.float64), (3, tf.float32)]
)
@pytest.mark.parametrize(("exchange", "tolerance"), FORMS)
def test_sums_of_all_ranks_alike(exchange, tolerance, size, dtype):
    inputs = [random_tensors(rank, SHAPES, dtype) for rank in range(size)]
    results = summed(size, exchange, lambda rank: inputs[rank])
    assert_sums(results, inputs, tolerance)


@pytest.mark.parametrize(("size", "calls"), [(2, 1), (3, 2)])
@pytest.mark.parametrize(
    ("exchange", "dtype"),
    [(fp16_shards, tf.float16), (bf16_shards, tf.bfloat16)],
)
def test_sums_in_32_bits_are_rounded_once(exchange, dtype, size, calls):
    rows = [
        tf.constant([[2.0**100, -0.0, np.nan], [rank / 3, -1e-7, 1e4]])
        for rank in range(size)
    ]
    results, keys = on_ranks(
        size, lambda t: exchange(t, [rows[t.rank], tf.ones(2)], "k")
    )
    total = tf.add_n([tf.cast(tf.cast(r, dtype), tf.float32) for r in rows])
    wanted = tf.cast(tf.cast(total, dtype), tf.float32).numpy().tobytes()
    assert {result[0].numpy().tobytes() for result in results} == {wanted}
    # Two ranks need one exchange, which uses both directions of a link.
    assert len(set(keys)) == calls


def test_float16_is_summed_in_hardware_or_in_shards():
    # In float16, each 1 would be lost in the first sum.
    rows = [tf.constant([2048.0]), tf.constant([1.0]), tf.constant([1.0])]

    def totals(exchange, **engine):
        return on_ranks(3, lambda t: exchange(t, [rows[t.rank]], "k"), **engine)

    for (total,) in totals(fp16, sums_float16=True)[0]:
        assert total.numpy() == [2048]
    for (total,) in totals(fp16, sums_float16=False)[0]:
        assert total.numpy() == [2050]
    assert totals(fp16, sums_float16=False) == totals(fp16_shards)


@pytest.mark.parametrize("exchange", ROUNDING)
def test_16_bits_travel_as_they_are(exchange):
    values = [
        tf.cast([1.0009765625, 1.0078125, 3], dtype)
        for dtype in (tf.float16, tf.bfloat16)
    ]
    for result in summed(
        2, exchange, lambda rank: [value * (1 - rank) for value in values]
    ):
        for value, total in zip(values, result, strict=True):
            np.testing.assert_array_equal(total, value, strict=True)


@pytest.mark.parametrize("exchange", ROUNDING)
def test_integers_are_refused(exchange):
    with pytest.raises(TowerError, match="gradient 1 is int32"):
        exchange(SingleProcess(), [tf.ones(2), tf.constant([1])], "k")


BEYOND = [6e4, 1e6, np.nan, 1.0]  # The sum of two is too large; each is.


@pytest.mark.parametrize(
    ("exchange", "row", "expected"),
    [
        (fp16, BEYOND, [np.inf, np.inf, np.nan, 2]),
        (fp16_shards, BEYOND, [np.inf, np.inf, np.nan, 2]),
        (bf16_shards, [2.0**100, np.inf, np.nan], [2.0**101, np.inf, np.nan]),
    ],
)
def test_what_16_bits_cannot_hold_is_seen(exchange, row, expected):
    for (result,) in summed(2, exchange, lambda rank: [tf.constant(row)]):
        np.testing.assert_array_equal(result, expected)


def test_nothing_to_sum_and_shapes_that_are_not_known():
    for exchange, _ in FORMS:
        assert exchange(SingleProcess(), [], "k") == []

    @tf.function(input_signature=[tf.TensorSpec([None, 2])] * 2)
    def run(a, b):
        return fp16_shards(SingleProcess(), [a, b], "k")

    first, second = run(tf.ones([3, 2]), tf.zeros([0, 2]))
    assert first.shape == (3, 2)
    assert second.shape == (0, 2)


@pytest.mark.parametrize(
    ("exchange", "dtype", "bits"),
    [(fp16, tf.float16, 10), (bf16_shards, tf.bfloat16, 7)],
)
def test_error_feedback_makes_up_for_rounding(exchange, dtype, bits):
    # A third of the way between two numbers of the short format.
    value = tf.constant([1 + 2.0**-bits / 3] * 3)

    def total(exchange):
        @tf.function
        def run():
            result = tf.zeros(3)
            for _ in tf.range(300):
                result += exchange(SingleProcess(), [value], "k")[0]
            return result

        return (run() - 300 * value).numpy()

    assert np.abs(total(exchange)).min() > 0.05
    assert np.abs(total(chain(error_feedback(dtype), exchange))).max() < 0.02


def test_error_feedback_forgets_what_is_not_finite():
    exchange = chain(error_feedback(tf.float16), fp16_shards)
    run = tf.function(lambda x: exchange(SingleProcess(), [x], "k")[0])
    assert np.isinf(run(tf.constant([1e6, 1.0]))[0])
    assert np.isnan(run(tf.constant([np.nan, 1.0]))[0])
    np.testing.assert_array_equal(run(tf.constant([2.0, 1.0])), [2, 1])


def test_error_feedback_of_another_model_under_the_same_key():
    exchange = chain(error_feedback(tf.float16), fp16_shards)
    for shape in ([3], [2, 2], [3]):
        (result,) = exchange(SingleProcess(), [tf.ones(shape)], "k")
        assert result.shape == shape


def test_links_of_a_chain():
    exchange = chain(pack(GradientPacker(2, min_elements=1)), fp16)
    inputs = [random_tensors(rank, SHAPES, tf.float32) for rank in range(2)]
    results = summed(2, exchange, lambda rank: inputs[rank])
    assert_sums(results, inputs, 4e-3)
    assert [tensor.shape for tensor in results[0]] == SHAPES
