"""Along which axis an operation is divided, and where a sum is completed."""

import numpy as np
import tensorflow as tf

from tests.partition.kit import (
    check_described,
    each,
    partial_sum,
    replicated,
    sharded,
)
from tests.partition.rules.cases.case import axis_size

X, W, TOTAL = sharded(-1, 4), replicated(4), partial_sum(4)
COLUMNS, WHOLE = sharded(4, -1), replicated(4, dtype="int32", high=3)
DOUBLE, HALF = partial_sum(4, dtype="float64"), partial_sum(4, dtype="float16")
COUNT = partial_sum(4, dtype="int32", low=1, high=9)
KNOWN = sharded(-1, 4, examples=6)


def _size(x):
    return tf.cast(axis_size(x), tf.float32)


def _found(x):
    """A number that depends on the data, and may be 0."""
    return tf.cast(axis_size(tf.where(x > 0)), tf.float32)


# A tower's term may be 0 although the sum is not, and 0 times infinity is NaN.
FACTORS = {
    "a constant": ("sum of [4]", lambda t: 2.0 * t, TOTAL),
    "an infinite constant": (
        "whole [4]",
        lambda t: t * [1, 2, 3, np.inf],
        TOTAL,
    ),
    "a weight": ("whole [4]", lambda t, w: t * w, TOTAL, W),
    "a bounded function": ("sum of [4]", lambda t, w: t * tf.tanh(w), TOTAL, W),
    "an unbounded function": (
        "whole [4]",
        lambda t, w: t * tf.exp(w),
        TOTAL,
        W,
    ),
    "what is moved": (
        "sum of [4]",
        lambda t, w: t * tf.reshape(tf.stack([tf.sin(w)]), [4]),
        TOTAL,
        W,
    ),
    "what is moved of a weight": (
        "whole [4]",
        lambda t, w: t * tf.concat([tf.sin(w[:2]), w[2:]], 0),
        TOTAL,
        W,
    ),
    "integers": (
        "sum of [4]",
        lambda t, i: t * tf.cast(i, t.dtype),
        TOTAL,
        WHOLE,
    ),
    "integers as halves": (
        "whole [4]",
        lambda t, i: t * tf.cast(i, t.dtype),
        HALF,
        WHOLE,
    ),
    "a wider float": (
        "sum of [4]",
        lambda t: t * tf.cast(tf.constant([1.0, 2, 3, 4]), t.dtype),
        DOUBLE,
    ),
    "a narrower float": (
        "whole [4]",
        lambda t, w: t * tf.cast(tf.sin(tf.cast(w, tf.float64)), t.dtype),
        TOTAL,
        W,
    ),
    "the number of examples": (
        "sum of [4]",
        lambda t, x: t * _size(x),
        TOTAL,
        X,
    ),
    "a sum": ("whole [4]", lambda t: t * t, TOTAL),
    "a choice of infinities": (
        "whole [4]",
        lambda t: t * tf.one_hot(1, 4, on_value=1.0, off_value=np.inf),
        TOTAL,
    ),
    "a matrix of constants": (
        "sum of [2]",
        lambda t: tf.linalg.matvec(tf.fill((2, 4), 0.25), t),
        TOTAL,
    ),
    "a divisor": ("sum of [4]", lambda t: t / 4.0, TOTAL),
    "a divisor of 0": ("whole [4]", lambda t: t / [1.0, 0.0, 1.0, 1.0], TOTAL),
    "the number of examples as divisor": (
        "sum of [4]",
        lambda t, x: t / _size(x),
        TOTAL,
        X,
    ),
    "a number found as divisor": (
        "whole [4]",
        lambda t, x: t / _found(x),
        TOTAL,
        X,
    ),
    "a sum as divisor": (
        "whole [4]",
        lambda t, w: w / t,
        partial_sum(4, low=1.0),
        W,
    ),
    "a divisor that is never 0": (
        "sum of [4]",
        lambda t, w: tf.math.divide_no_nan(t, w),
        TOTAL,
        W,
    ),
    "a choice": ("sum of [4]", lambda t, w: tf.where(w > 0, t, w), TOTAL, W),
    "a choice by the sum": (
        "whole [4]",
        lambda t, w: tf.where(t > 0, w, w),
        TOTAL,
        W,
    ),
    "rows": ("rows 0 of [n, 4]", lambda t, x: t + x, TOTAL, X),
    "a term": ("sum of [4]", lambda t, w: t - w, TOTAL, W),
    "a term of rows": (
        "sum of [4]",
        lambda t, x: t + tf.reduce_sum(x, 0),
        TOTAL,
        X,
    ),
}


@each(FACTORS)
def test_where_a_sum_meets_it(case):
    check_described(*case)


# Sums are rounded once, not each term.
CASTS = {
    "a wider float": ("sum of [4]", lambda t: tf.cast(t, tf.float64), TOTAL),
    "the same": (
        "sum of [4]",
        lambda t: tf.raw_ops.Cast(x=t, DstT=t.dtype),
        TOTAL,
    ),
    "a narrower float": ("whole [4]", lambda t: tf.cast(t, tf.float32), DOUBLE),
    "another half": ("whole [4]", lambda t: tf.cast(t, tf.bfloat16), HALF),
    "integers": ("whole [4]", lambda t: tf.cast(t, tf.int32), TOTAL),
    "a float of integers": (
        "whole [4]",
        lambda t: tf.cast(t, tf.float32),
        COUNT,
    ),
    "truth values": ("whole [4]", lambda t: tf.cast(t, tf.bool), COUNT),
}


@each(CASTS)
def test_where_a_sum_is_cast_to(case):
    check_described(*case, tolerance=2e-2)


CHOICES = {
    "rows of both": ("rows 0 of [n, 4]", lambda x, y: x * y, X, X),
    "rows of one": ("rows 0 of [n, 4]", lambda x, w: w - x, X, W),
    "rows and columns": (
        "rows 0 of [n, 4]",
        lambda x, y: x + tf.transpose(y),
        X,
        COLUMNS,
    ),
    "pairs of rows": ("rows 0 of [n, n, 4]", lambda x: x[:, None] - x[None], X),
    "a row that is broadcast": (
        "rows 0 of [n, 4]",
        lambda x, w: x + w,
        X,
        replicated(1, 4),
    ),
    "rows that are one per tower": (
        "rows 0 of [n, 4]",
        lambda x: x + tf.reduce_sum(x, 0, keepdims=True),
        X,
    ),
    "no axis": ("rows 0 of [n, 4]: ReverseV2", lambda x: tf.reverse(x, [0]), X),
    "rows beside columns": (
        "rows 0 of [n, 4, 4, n]",
        lambda x, y: tf.tensordot(x, y, 0),
        X,
        COLUMNS,
    ),
}


@each(CHOICES)
def test_which_axis_is_divided(case):
    check_described(*case)


# Where the trace knows the number of examples, another size may equal it.
MADE = {
    "ones": ("rows 0 of [6, 4]", lambda x: x + tf.ones([6, 4]), KNOWN),
    "a range": (
        "rows 0 of [6, 4]",
        lambda x: x * tf.range(6.0)[:, None],
        KNOWN,
    ),
    "ones that are transposed": (
        "rows 0 of [6, 4]",
        lambda x: x - tf.transpose(2 * tf.ones([4, 6])),
        KNOWN,
    ),
    "a table of units": (
        "rows 0 of [6, 4]",
        lambda x: x * tf.one_hot(tf.range(6) % 4, 4),
        KNOWN,
    ),
    "a matrix with as many units": (
        "rows 0 of [6, 6]",
        lambda x: x @ tf.ones([4, 6]),
        KNOWN,
    ),
    "its transpose": (
        "rows 1 of [6, 6]",
        lambda x: tf.transpose(x @ tf.ones([4, 6])),
        KNOWN,
    ),
    "ones beside rows": (
        "rows 0 of [6, 4], whole [6, 4]",
        lambda x: (2 * x, 2 * tf.ones([6, 4])),
        KNOWN,
    ),
    "joined ones": (
        "rows 0 of [12, 4] in 2 blocks",
        lambda x: tf.concat([x, tf.fill([6, 4], 2.0)], 0),
        KNOWN,
    ),
    "joined numbers": (
        "rows 0 of [12] in 2 blocks",
        lambda i: tf.concat([i, tf.fill([6], 1)], 0),
        sharded(-1, dtype="int32", examples=6),
    ),
    "tiled ones": (
        "rows 0 of [6, 4]",
        lambda x, w: x * tf.tile(w[None], [6, 1]),
        KNOWN,
        W,
    ),
    "reshaped numbers": (
        "rows 0 of [6, 4]",
        lambda x: x + tf.reshape(tf.range(24.0), [6, 4]),
        KNOWN,
    ),
}


@each(MADE)
def test_rows_of_what_is_made_from_sizes(case):
    check_described(*case)
