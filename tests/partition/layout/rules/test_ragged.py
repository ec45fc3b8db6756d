"""Ragged rows, such as texts: parted, cut, counted, joined and padded."""

import dataclasses

import pytest
import tensorflow as tf

from tests.kit.sampling import sample_of
from tests.partition import kit
from tests.partition.kit import check_divided, check_on_towers, sharded

pytestmark = pytest.mark.alternate

# Towers without texts, and batches of a single one.
TOWERS = ((5, 2), (2, 0, 3), (1, 1, 4), (0, 1, 0))
_OF_SIX = (3, 3), (0, 6), (2, 0, 4)
_PARTS = sharded(-1, 3, dtype="string")
_LENGTHS = sharded(-1, dtype="int32", low=0, high=5)
_TABLE = sharded(-1, 4, dtype="int32", low=0, high=2)


def _ragged(values, splits):
    return tf.RaggedTensor.from_row_splits(values, splits, validate=False)


def _mapped(function, ragged):
    return tf.ragged.map_flat_values(function, ragged)


def _kept(ragged):
    """The entries whose first number is positive."""
    mask = _mapped(lambda values: values[:, 0] > 0, ragged)
    return tf.ragged.boolean_mask(ragged, mask)


def _sums_of_squares(ragged):
    return tf.reduce_sum(tf.square(ragged.to_tensor()), [1, 2])


_STEPS = {
    "padded": lambda r: r.to_tensor(),
    "padded to a length": lambda r: r.to_tensor(7.0, shape=[None, 2, 3]),
    "mean of the padded": lambda r: tf.reduce_mean(tf.tanh(r.to_tensor()), 1),
    "flat padded": lambda r: tf.reshape(tf.tanh(r.to_tensor()), [-1, 3]),
    "first entries": lambda r: r[:, :2].to_tensor(),
    "without the first": lambda r: _sums_of_squares(r[:, 1:]),
    "last entries": lambda r: r[:, -2:].to_tensor(),
    "every second": lambda r: r[:, ::2].to_tensor(),
    "kept": lambda r: _kept(r).to_tensor(),
    "sums": lambda r: tf.reduce_sum(r * r, 1),
    "means": lambda r: tf.reduce_mean(r, 1),
    "joined rows": lambda r: (r + r * r).to_tensor(),
    "one more axis": lambda r: tf.expand_dims(r, 1).to_tensor(),
    "lengths": lambda r: (
        r.values
        * tf.cast(tf.reduce_max(r.row_lengths()) + r.nrows(), tf.float32)
    ),
}


@pytest.mark.parametrize("name", sample_of(_STEPS))
def test_ragged_rows_are_divided(name):
    def step(values, splits):
        return _STEPS[name](_ragged(values, splits))

    given = kit.ragged(3)
    check_divided(kit.with_gradients(step), *given, towers=TOWERS)


def _texts(parts):
    """Texts of up to three words each; some have none."""
    joined = tf.strings.join([parts[:, k] for k in range(3)], " ")
    return tf.strings.regex_replace(joined, "a1", "")


def _words(parts):
    return tf.strings.split(_texts(parts))


def _numbers(words):
    return _mapped(lambda w: tf.strings.to_hash_bucket_fast(w, 5), words)


def _counts(parts, **options):
    return tf.math.bincount(_numbers(_words(parts)), axis=-1, **options)


def _sparse_counts(numbers, **options):
    return tf.sparse.to_dense(tf.sparse.bincount(numbers, axis=-1, **options))


def _sparse_sums(numbers):
    return _sparse_counts(numbers, weights=tf.cast(numbers, tf.float32))


def _weighted(parts):
    """Counts that have as many columns as the data say."""
    numbers = _numbers(_words(parts))
    weights = tf.cast(numbers, tf.float32) * 0.1
    return tf.math.bincount(numbers, weights=weights, axis=-1)


def _characters(parts):
    return tf.strings.unicode_split(_texts(parts), "UTF-8")


_PHRASES = [["x"], [], ["y", "z"]]
_OF_TEXTS = {
    "words": lambda p: (_words(p).to_tensor(), _words(p).values),
    "lengths": lambda p: (
        _words(p).row_lengths(),
        _words(p).bounding_shape(),
        _words(p).value_rowids(),
    ),
    "first words": lambda p: _words(p)[:, :2].to_tensor("none"),
    "shape": lambda p: tf.raw_ops.StringSplitV2(input=_texts(p), sep="").shape,
    "counts": lambda p: _counts(p, minlength=5, maxlength=5),
    "sparse counts": lambda p: _sparse_counts(_numbers(_words(p))),
    "sparse sums": lambda p: _sparse_sums(_numbers(_words(p))),
    "sparse multi-hot": lambda p: _sparse_counts(
        _numbers(_words(p)), maxlength=4, binary_output=True
    ),
    "phrases": lambda p: tf.gather(
        tf.ragged.constant(_PHRASES),
        tf.strings.to_hash_bucket_fast(p[:, 0], 3),
    ).to_tensor(),
    "gathered": lambda p: tf.gather(
        _words(p), tf.where(tf.not_equal(p[:, 0], "bb"))[:, 0]
    ).to_tensor(),
    "multi-hot": lambda p: _counts(p, maxlength=4, binary_output=True),
    "weighted": _weighted,
    "counts of all": lambda p: tf.math.bincount(_numbers(_words(p)).values),
    "pairs": lambda p: tf.strings.ngrams(_words(p), 2).to_tensor(),
    "joined": lambda p: tf.strings.reduce_join(_words(p), -1, separator="-"),
    "means": lambda p: tf.reduce_mean(tf.cast(_numbers(_words(p)), "float"), 1),
    "characters": lambda p: _characters(p).to_tensor(),
    "codes": lambda p: tf.strings.unicode_decode(
        _texts(p), "UTF-8"
    ).to_tensor(),
    "bytes of words": lambda p: tf.strings.bytes_split(_words(p)).to_tensor(),
    "crossed": lambda p: tf.sparse.to_dense(
        tf.sparse.cross_hashed([p[:, :2], p[:, 2:]], 9)
    ),
}


@pytest.mark.parametrize("name", sample_of(_OF_TEXTS))
def test_texts_are_divided(name):
    check_divided(_OF_TEXTS[name], _PARTS, towers=TOWERS)
    known = dataclasses.replace(_PARTS, examples=6)
    check_divided(_OF_TEXTS[name], known, towers=_OF_SIX)


def test_row_splits_are_those_of_all_words():
    check_on_towers(lambda p: _words(p).row_splits, _PARTS, towers=TOWERS)


def test_one_exchange_finds_all_longest_rows():
    program = check_divided(_OF_TEXTS["bytes of words"], _PARTS, towers=TOWERS)
    # The other one gathers the result.
    assert kit.exchange_counts(program) == {"gather": 2}


def test_numbers_of_bins_that_are_known_need_no_exchange():
    program = check_divided(_OF_TEXTS["counts"], _PARTS, towers=TOWERS)
    assert kit.exchange_counts(program) == {"gather": 1}


def test_padded_tables_become_ragged():
    def step(table, lengths):
        of_lengths = tf.RaggedTensor.from_tensor(table, lengths)
        of_padding = tf.RaggedTensor.from_tensor(table, padding=0)
        return of_lengths.to_tensor(), of_padding.to_tensor(9)

    check_divided(step, _TABLE, _LENGTHS, towers=TOWERS)


def test_sums_of_earlier_rows_are_divided():
    def step(x):
        before = tf.cumsum(x, exclusive=True)
        return tf.tanh(before), tf.cumsum(x, reverse=True)

    given = sharded(-1, 3)
    check_on_towers(kit.with_gradients(step), given, towers=TOWERS)
    check_divided(lambda x: tf.tanh(tf.cumsum(x)), given, towers=TOWERS)


def _example(number):
    """An example with a dense feature, and others of several lengths."""
    features = {
        "dense": {"float_list": {"value": [number, 0.5]}},
        "ids": {"int64_list": {"value": range(number)}},
        "words": {"bytes_list": {"value": [b"a"] * (number % 3)}},
    }
    return tf.train.Example(features={"feature": features}).SerializeToString()


_FEATURES = {
    "dense": tf.io.FixedLenFeature([2], tf.float32),
    "none": tf.io.FixedLenFeature([], tf.int64, 7),
    "ids": tf.io.VarLenFeature(tf.int64),
    "words": tf.io.RaggedFeature(tf.string),
}
_LONGEST = tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True)


def _parsed(numbers, features=_FEATURES):
    examples = tf.constant([_example(number) for number in range(6)])
    return tf.io.parse_example(tf.gather(examples, numbers), features)


@pytest.mark.parametrize("examples", [None, 6])
def test_parsed_examples_are_divided(examples):
    def step(numbers):
        found = _parsed(numbers)
        ids, words = found["ids"], found["words"]
        return (
            *(found["dense"] * 2, found["none"]),
            *(ids.indices, ids.values, tf.sparse.to_dense(ids)),
            *(words.values, words.row_lengths(), words.to_tensor()),
        )

    given = dataclasses.replace(_LENGTHS, examples=examples)
    towers = TOWERS if examples is None else _OF_SIX
    check_divided(step, given, towers=towers)


def test_a_feature_that_is_padded_to_the_longest_is_parsed_once():
    def step(numbers):
        return _parsed(numbers, {"ids": _LONGEST})["ids"] * 2

    program = check_on_towers(step, _LENGTHS, towers=TOWERS)
    assert list(kit.computed_once(program)) == ["ParseExampleV2"]


_HOSTILE = {
    "lengths of other rows": lambda n: tf.RaggedTensor.from_row_lengths(
        tf.range(tf.reduce_sum(n)), n[::-1], validate=False
    ).to_tensor(),
    "a range of rows": lambda n: tf.ragged.range(n, n + 2).to_tensor(),
    "places in other rows": lambda n: tf.gather(
        tf.range(tf.reduce_sum(n) + 9), tf.cumsum(n) + 3
    ),
    "a mask of other lengths": lambda n: tf.boolean_mask(
        tf.ones([tf.size(n), 4]),
        tf.range(4) < tf.maximum(tf.minimum(n, 2), 0)[:, None],
    ),
    "negative lengths": lambda n: (
        tf.cumsum(n - 2),
        tf.size(tf.repeat(n, n - 2)),
        tf.reduce_mean(tf.cast(tf.repeat(n, n - 2), tf.float32)),
    ),
    "a number of more rows": lambda n: tf.math.bincount(
        n, minlength=tf.size(n) + 1, maxlength=tf.size(n) + 1
    ),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_what_only_looks_like_ragged_rows(name):
    check_on_towers(_HOSTILE[name], _LENGTHS, towers=TOWERS)


@pytest.mark.parametrize("examples", [None, 6])
def test_rows_that_are_computed_once_are_divided_again(examples):
    """Not even what sorts examples makes towers wait for what follows."""

    def step(x, matrix):
        order = tf.argsort(x[:, 0])
        return tf.reduce_mean(tf.tanh(tf.gather(x, order) @ matrix) ** 2)

    given = sharded(-1, 3, examples=examples), kit.replicated(3, 64)
    program = check_on_towers(step, *given, towers=_OF_SIX)
    assert list(kit.computed_once(program)) == ["TopKV2"]
    products = [o for o in program.operations if o.type == "MatMul"]
    assert all("towers" in product.axes for product in products)
