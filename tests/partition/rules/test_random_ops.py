"""Which rows of random numbers towers draw."""

import tensorflow as tf

from tests.partition.kit import check_described, each, sharded
from tests.partition.rules.cases.case import axis_size

X = sharded(-1, 4)
TEXTS = sharded(-1, 3, 4, hidden=(1,))


def _drawn(*sizes, draw=tf.random.stateless_uniform, **options):
    def function(x):
        own = [size(x) if callable(size) else size for size in sizes]
        return draw(own, [1, 2], **options)

    return function


def _n(x):
    return axis_size(x)


def _words(x):
    return axis_size(x, 1)


_NORMAL = tf.random.stateless_normal
_TRUNCATED = tf.random.stateless_truncated_normal
_INTEGERS = {"maxval": 9, "dtype": tf.int64}
DRAWS = {
    "four numbers of each row": ("rows 0 of [n, 4]", _drawn(_n, 4), X),
    "three numbers of each row": ("rows 0 of [n, 3]", _drawn(_n, 3), X),
    "a number of each row": ("rows 0 of [n]", _drawn(_n), X),
    "three matrices of each row": (
        "rows 0 of [n, 3, 2, 2]",
        _drawn(_n, 3, 2, 2),
        X,
    ),
    "twice as many rows": (
        "rows 0 of [2*n, 3]",
        _drawn(lambda x: 2 * _n(x), 3),
        X,
    ),
    "rows of a varying length": (
        "rows 0 of [n, 0.1, 4]",
        _drawn(_n, _words, 4),
        TEXTS,
    ),
    "rows as columns": ("whole [4, n]", _drawn(4, _n), X),
    "numbers without rows": ("whole [3, 4]", _drawn(3, 4), X),
    "normal numbers": ("rows 0 of [n, 3]", _drawn(_n, 3, draw=_NORMAL), X),
    "halves": ("rows 0 of [n, 3]", _drawn(_n, 3, dtype=tf.float16), X),
    "doubles": ("rows 0 of [n, 3]", _drawn(_n, 3, dtype=tf.float64), X),
    "integers": ("rows 0 of [n, 3]", _drawn(_n, 3, **_INTEGERS), X),
    "truncated numbers": (
        "rows 0 of [n, 3]",
        _drawn(_n, 3, draw=_TRUNCATED),
        X,
    ),
    "truncated numbers in groups": (
        "rows 0 of [n, 4]",
        _drawn(_n, 4, draw=_TRUNCATED),
        X,
    ),
    "doubles that are truncated": (
        "rows 0 of [n, 3]",
        _drawn(_n, 3, draw=_TRUNCATED, dtype=tf.float64),
        X,
    ),
    "gamma": (
        "whole [n, 4]",
        _drawn(_n, 4, draw=tf.random.stateless_gamma, alpha=1.0),
        X,
    ),
}


@each(DRAWS)
def test_draws(case):
    check_described(*case)
