"""How towers have sums, means, extremes and cumulative sums."""

import tensorflow as tf

from tests.partition.kit import (
    check_described,
    each,
    exchange_counts,
    replicated,
    sharded,
)

X, COLUMNS = sharded(-1, 4, 6), sharded(4, -1)
VIEWS = sharded(-1, 4, blocks=2)
TEXTS = WORDS = sharded(-1, 3, 4, hidden=(1,))
SINGLE = sharded(-1, 1, 4, hidden=(1,))


CUMULATIVE = {
    "Cumsum of rows": ("rows 0 of [n, 4, 6]", tf.cumsum, X),
    "Cumsum of earlier rows": (
        "rows 0 of [n, 4, 6]",
        lambda x: tf.cumsum(x, exclusive=True),
        X,
    ),
    "Cumsum of later rows": (
        "rows 0 of [n, 4, 6]: Cumsum",
        lambda x: tf.cumsum(x, reverse=True),
        X,
    ),
    "Cumsum of views": (
        "rows 0 of [2*n, 4] in 2 blocks: Cumsum",
        tf.cumsum,
        VIEWS,
    ),
    "Cumsum of columns": (
        "rows 1 of [4, n]",
        lambda x: tf.cumsum(x, 1),
        COLUMNS,
    ),
    "Cumprod of rows": ("rows 0 of [n, 4, 6]: Cumprod", tf.math.cumprod, X),
}


@each(CUMULATIVE)
def test_cumulative(case):
    check_described(*case)


def _moments(axes, keeps=False):
    return lambda x: tf.nn.moments(x, axes, keepdims=keeps)


MOMENTS = {
    "of rows": ("whole [4, 6], whole [4, 6]", _moments([0]), X),
    "of rows and more": ("whole [4], whole [4]", _moments([0, 2]), X),
    "that keep their axes": (
        "whole [1, 1, 6], whole [1, 1, 6]",
        _moments([0, 1], True),
        X,
    ),
    "of columns": ("whole [4], whole [4]", _moments([1]), COLUMNS),
    "of views": ("whole [4], whole [4]", _moments([0]), VIEWS),
}


@each(MOMENTS)
def test_mean_and_variance_share_their_exchange(case):
    program = check_described(*case)
    assert exchange_counts(program) == {"gather": 3}


def _broadcast(x, w):
    return tf.gradients(tf.reduce_sum(tf.sin(x + w)), [x, w])


BROADCASTS = {
    "to words": (
        "rows 0 of [n, 0.1, 4], rows 0 of [n, 1, 4]",
        _broadcast,
        TEXTS,
        sharded(-1, 1, 4),
    ),
    "to words of another number": (
        "rows 0 of [n, 0.1, 4], rows 0 of [n, 1.1, 4]",
        _broadcast,
        TEXTS,
        WORDS,
    ),
    "of a single word": (
        "rows 0 of [n, 0.1, 4], rows 0 of [n, 1.1, 4]",
        _broadcast,
        TEXTS,
        SINGLE,
    ),
    "to texts": (
        "rows 0 of [n, 0.1, 4], sum of [4]",
        _broadcast,
        TEXTS,
        replicated(4),
    ),
}


@each(BROADCASTS)
def test_gradient_of_a_broadcast(case):
    """Its axes may be known only when the step runs."""
    check_described(*case)
