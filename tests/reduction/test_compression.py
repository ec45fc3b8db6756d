"""Gradients that travel in 16 bits: what arrives, and what rounding costs."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction import compression, exact, with_error_feedback
from keras_towers.reduction.compression import (
    bf16_shards,
    fp16,
    fp16_shards,
    resolve,
)
from keras_towers.reduction.exchange import buckets
from keras_towers.transport import SingleProcess
from tests.reduction.ranks import on_ranks, random_tensors

SHAPES = [(7, 3), (), (5,), (0, 4), (1, 1), (1000,)]
FORMS = [
    (exact, 1e-6),
    (fp16, 4e-3),
    (fp16_shards, 2e-3),
    (bf16_shards, 2e-2),
]


def summed(size, exchange, tensors_of):
    def rank(transport):
        tensors = tensors_of(transport.rank)
        return exchange(transport, tensors, "k")

    return on_ranks(size, rank)[0]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("exchange", "tolerance"), FORMS)
def test_sums_of_all_ranks_alike(exchange, tolerance, size, dtype):
    results = summed(
        size, exchange, lambda rank: random_tensors(rank, SHAPES, dtype)
    )
    inputs = [random_tensors(rank, SHAPES, dtype) for rank in range(size)]
    for result in results:
        for index, (total, first) in enumerate(
            zip(result, results[0], strict=True)
        ):
            wanted = sum(row[index].numpy() for row in inputs)
            assert total.dtype == dtype
            assert total.shape == SHAPES[index]
            assert total.numpy().tobytes() == first.numpy().tobytes()
            scale = max(1, np.abs(wanted).max(initial=0))
            np.testing.assert_allclose(total, wanted, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("exchange", [fp16, fp16_shards, bf16_shards])
def test_16_bits_travel_as_they_are(exchange, dtype):
    value = tf.cast([1.0009765625, 1.0078125, 3], dtype)
    for result in summed(2, exchange, lambda rank: [value * (1 - rank)]):
        assert result[0].dtype == dtype
        assert tf.reduce_all(result[0] == value)


@pytest.mark.parametrize("exchange", [fp16, fp16_shards, bf16_shards])
def test_integers_are_refused(exchange):
    with pytest.raises(TowerError, match="gradient 1 is int32"):
        exchange(SingleProcess(), [tf.ones(2), tf.constant([1])], "k")


@pytest.mark.parametrize("exchange", [fp16, fp16_shards])
def test_what_float16_cannot_hold_is_seen(exchange):
    # 6e4 fits, the sum of two does not; 1e6 does not fit.
    rows = [tf.constant([6e4, 1e6, np.nan, 1.0])] * 2
    for (result,) in summed(2, exchange, lambda rank: [rows[rank]]):
        assert np.isinf(result[:2]).all()
        assert np.isnan(result[2])
        assert result[3] == 2


def test_bfloat16_has_the_range_of_float32():
    rows = [tf.constant([2.0**100, np.inf, np.nan])] * 2
    for (result,) in summed(2, bf16_shards, lambda rank: [rows[rank]]):
        np.testing.assert_array_equal(result, [2.0**101, np.inf, np.nan])


def test_nothing_to_sum():
    for exchange, _ in FORMS:
        assert exchange(SingleProcess(), [], "k") == []


def test_shapes_that_are_not_known():
    @tf.function(input_signature=[tf.TensorSpec([None, 2])] * 2)
    def run(a, b):
        return fp16_shards(SingleProcess(), [a, b], "k")

    first, second = run(tf.ones([3, 2]), tf.zeros([0, 2]))
    assert first.shape == (3, 2)
    assert second.shape == (0, 2)


def test_last_gradients_travel_first():
    tensors = [
        tf.zeros(10),
        tf.zeros(30),
        tf.zeros(3, tf.float64),
        tf.zeros(20),
        tf.zeros(1),
    ]
    assert buckets(tensors, range(5), limit=80) == [[4, 3], [2], [1], [0]]
    assert buckets(tensors, [0, 1], limit=10**6) == [[1, 0]]


@pytest.mark.parametrize(
    ("exchange", "dtype"),
    [
        (fp16, tf.float16),
        (fp16_shards, tf.float16),
        (bf16_shards, tf.bfloat16),
    ],
)
def test_error_feedback_makes_up_for_rounding(exchange, dtype):
    # A third of the way between two numbers of the short format.
    value = tf.constant([1 + float(np.ldexp(1 / 3, -10))] * 3)
    if dtype == tf.bfloat16:
        value = tf.constant([1 + float(np.ldexp(1 / 3, -7))] * 3)

    def total(exchange):
        @tf.function
        def run():
            result = tf.zeros(3)
            for _ in tf.range(300):
                result += exchange(SingleProcess(), [value], "k")[0]
            return result

        return (run() - 300 * value).numpy()

    assert np.abs(total(exchange)).min() > 0.05
    assert np.abs(total(with_error_feedback(exchange, dtype))).max() < 0.02


def test_error_feedback_forgets_what_is_not_finite():
    exchange = with_error_feedback(fp16_shards, tf.float16)
    run = tf.function(lambda x: exchange(SingleProcess(), [x], "k")[0])
    assert np.isinf(run(tf.constant([1e6, 1.0]))[0])
    assert np.isnan(run(tf.constant([np.nan, 1.0]))[0])
    np.testing.assert_array_equal(run(tf.constant([2.0, 1.0])), [2, 1])


def test_error_feedback_of_another_model_under_the_same_key():
    exchange = with_error_feedback(fp16_shards, tf.float16)
    for shape in ([3], [2, 2], [3]):
        (result,) = exchange(SingleProcess(), [tf.ones(shape)], "k")
        assert result.shape == shape


@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        (None, exact),
        ("none", exact),
        ("fp16", fp16),
        ("fp16-shards", fp16_shards),
        ("bf16", bf16_shards),
        (fp16_shards, fp16_shards),
    ],
)
def test_names(name, exchange):
    assert resolve(name) is exchange


def test_feedback_has_a_memory_of_its_own():
    assert resolve("bf16-feedback") is not resolve("bf16-feedback")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(TowerError) as error:
        resolve("zip")
    for name in (*compression._NAMED, *compression._WITH_FEEDBACK):
        assert repr(name) in str(error.value)
