"""Fingerprints by which ranks compare their data."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.data import same_data
from keras_towers.foundation import compat

pytestmark = pytest.mark.core
X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")


def strings(*values):
    # Each a new object, as in another process.
    return tf.constant(["".join(list(value)) for value in values])


def kinds(x):
    """Batches of all kinds that tell what a few numbers are."""
    ragged = tf.RaggedTensor.from_row_lengths(x[:, 0], [3, 0, 17])
    return {
        "float32": x,
        "float64": x.astype("float64"),
        "bfloat16": tf.cast(x, tf.bfloat16),
        "float8": tf.cast(x, tf.dtypes.experimental.float8_e5m2),
        "complex": x + 1j * x,
        "bool": x > 0,
        "int64": (10 * x).astype("int64"),
        "uint8": (9 + x).astype("uint8"),
        "tuple": (x, x[:, 0]),
        "dict": {"a": x[:, :1], "b": x[:, 1:]},
        "with None": (x, None),
        "strings": strings(*map(str, x.flat)),
        "ragged": ragged,
        "sparse": tf.sparse.from_dense(x),
        "NaN": np.where(x > 1, np.nan, x),
        "scalar": np.float32(x[0, 0]),
    }


def is_other(one, two, *rounding):
    one, two = (same_data.Fingerprint(given, *rounding) for given in (one, two))
    if not tf.reduce_any(one.numbers != two.numbers):
        return False
    (first, _), (values, slack) = one.sample(), two.sample()
    return bool(same_data.is_far(values, first, slack))


@pytest.mark.parametrize("kind", kinds(X))
def test_other_values_are_told_apart(kind):
    """In another order, by another scale, and one of them alone."""
    (one, same, *others) = (
        kinds(x)[kind]
        for x in (X, X.copy(), X[::-1].copy(), -X, X - 9 * (X[0, 0] == X))
    )
    assert not is_other(one, same)
    for other in others:
        assert is_other(one, other)


def test_rounding_is_no_difference_but_more_is():
    off, wide = 1 + 1e-7 * np.sign(X - 0.3), X.astype("float64")
    assert not is_other(X, X * off)
    assert is_other(wide, wide * off)
    assert not is_other(wide, wide * (1 + 1e-14))
    assert is_other(X, X * 1.00001)
    assert is_other(X, X[:-1])
    # Beside a column of large numbers, too.
    large = np.c_[X, np.full(20, 1.6e9)]
    assert is_other(large, np.where(large < 0, 0, large))
    assert is_other(large, large + (large == large.max()) * 3)
    # Of results more is rounding.
    assert not is_other(X, X * 1.00001, 1e-4)
    assert not is_other({}, {})
    assert not is_other(X[:0], X[:0])


def test_one_of_many_is_told_apart():
    many = np.arange(2**15) + 2**20
    for kind in ("int64", "float64", "uint8", "str"):
        other = many.astype(kind)
        other[-3] = other[-2]
        assert is_other(many.astype(kind), other)
    ones, nans = np.ones((99, 2)), np.ones((99, 2))
    nans[:, 1] = np.nan
    assert is_other(ones, nans)
    assert not is_other(nans, nans.copy())


class Unsliceable:
    """What NumPy can read, and nothing else."""

    def __init__(self, array):
        self._array, self.shape = array, array.shape

    def __array__(self, *given, **options):
        return self._array


@pytest.mark.parametrize(
    "made",
    [
        *(np.asarray, tf.constant, tf.RaggedTensor.from_tensor),
        *(tf.sparse.from_dense, Unsliceable),
        lambda x: np.array([str(value) for value in x.flat], object),
    ],
)
def test_other_rows_of_arrays_are_told_apart(made):
    x = np.tile(X, [100, 1])
    first, same, *others = (
        same_data.fingerprint_rows(compat.ArrayDataAdapter(made(array)))
        .numbers.numpy()
        .tolist()
        for array in (x, x.copy(), x[::-1].copy(), x[:-3], x + (x > 0))
    )
    assert first == same
    assert first not in others


RANGE = tf.data.Dataset.range(4)


def unordered():
    options = tf.data.Options()
    options.deterministic = False
    return options


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (RANGE.shuffle(4, seed=1).map(abs, num_parallel_calls=2), None),
        (RANGE.interleave(lambda _: RANGE, num_parallel_calls=2), None),
        (RANGE.shuffle(4).batch(2), "without a seed"),
        (RANGE.with_options(unordered()).batch(2), "options"),
        *(
            (unordered_step.batch(2).prefetch(1), "a step")
            for unordered_step in (
                RANGE.map(abs, num_parallel_calls=2, deterministic=False),
                RANGE.interleave(
                    lambda _: RANGE, num_parallel_calls=2, deterministic=False
                ),
            )
        ),
    ],
)
def test_datasets_whose_order_varies_are_found(dataset, why):
    found = same_data._why_order_varies(dataset)
    assert found is None if why is None else why in found
