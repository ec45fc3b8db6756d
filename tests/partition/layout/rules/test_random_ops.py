"""Which rows of random numbers towers draw."""

import tensorflow as tf

from tests.partition.kit import sharded
from tests.partition.layout.rules.cases.case import axis_size
from tests.partition.layout_list import as_listed

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
    "four numbers of each row": (_drawn(_n, 4), X),
    "three numbers of each row": (_drawn(_n, 3), X),
    "a number of each row": (_drawn(_n), X),
    "three matrices of each row": (_drawn(_n, 3, 2, 2), X),
    "twice as many rows": (_drawn(lambda x: 2 * _n(x), 3), X),
    "rows of a varying length": (_drawn(_n, _words, 4), TEXTS),
    "rows as columns": (_drawn(4, _n), X),
    "numbers without rows": (_drawn(3, 4), X),
    "normal numbers": (_drawn(_n, 3, draw=_NORMAL), X),
    "halves": (_drawn(_n, 3, dtype=tf.float16), X),
    "doubles": (_drawn(_n, 3, dtype=tf.float64), X),
    "integers": (_drawn(_n, 3, **_INTEGERS), X),
    "truncated numbers": (_drawn(_n, 3, draw=_TRUNCATED), X),
    "truncated numbers in groups": (_drawn(_n, 4, draw=_TRUNCATED), X),
    "doubles that are truncated": (
        _drawn(_n, 3, draw=_TRUNCATED, dtype=tf.float64),
        X,
    ),
    "gamma": (_drawn(_n, 4, draw=tf.random.stateless_gamma, alpha=1.0), X),
}


test_draws = as_listed("draws: draws", DRAWS)
