"""What arrives of gradients that travel in 16 bits."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.reduction.compression_hooks import (
    all_reduce,
    bf16_shards,
    fp16,
    fp16_shards,
)
from keras_towers.reduction.rank_sum import RankSum
from keras_towers.transport import SingleProcess
from tests.reduction.cases import assert_sums
from tests.reduction.ranks import Owner, alone, random_rows, summed

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


@pytest.mark.parametrize("exchange", ROUNDING)
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
    ("hook", "said"),
    [
        (lambda t, tensors, key: None, "NoneType for 2 gradients"),
        (lambda t, tensors, key: tensors[:1], "1 sums for 2 gradients"),
        (lambda t, tensors, key: [*tensors] * 2, "4 sums for 2 gradients"),
        (lambda t, tensors, key: [x[:1] for x in tensors], r"float32 \(1,\)"),
        (lambda t, tensors, key: [tf.cast(x, "int32") for x in tensors], "32"),
    ],
)
def test_sums_of_other_gradients_are_refused(hook, said):
    """Fewer would end the input, and other shapes may be broadcast."""
    rank_sum, owner = RankSum(SingleProcess(), hook), Owner()
    with pytest.raises(TowerError, match=f"hook {__name__}.*{said}"):
        rank_sum.sum(owner, [owner], [tf.ones(2), tf.ones(3)])
