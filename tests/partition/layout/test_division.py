"""Along which axis an operation is divided, and where a sum is completed."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partition.kit import (
    check_divided,
    exchange_counts,
    laid_out,
    partial_sum,
    replicated,
    sharded,
)
from tests.partition.layout.rules.cases.case import axis_size
from tests.partition.layout_list import as_listed, described

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
    "a constant": (lambda t: 2.0 * t, TOTAL),
    "an infinite constant": (lambda t: t * [1, 2, 3, np.inf], TOTAL),
    "a weight": (lambda t, w: t * w, TOTAL, W),
    "a bounded function": (lambda t, w: t * tf.tanh(w), TOTAL, W),
    "an unbounded function": (lambda t, w: t * tf.exp(w), TOTAL, W),
    "what is moved": (
        lambda t, w: t * tf.reshape(tf.stack([tf.sin(w)]), [4]),
        TOTAL,
        W,
    ),
    "what is moved of a weight": (
        lambda t, w: t * tf.concat([tf.sin(w[:2]), w[2:]], 0),
        TOTAL,
        W,
    ),
    "integers": (lambda t, i: t * tf.cast(i, t.dtype), TOTAL, WHOLE),
    "integers as halves": (lambda t, i: t * tf.cast(i, t.dtype), HALF, WHOLE),
    "a wider float": (
        lambda t: t * tf.cast(tf.constant([1.0, 2, 3, 4]), t.dtype),
        DOUBLE,
    ),
    "a narrower float": (
        lambda t, w: t * tf.cast(tf.sin(tf.cast(w, tf.float64)), t.dtype),
        TOTAL,
        W,
    ),
    "the number of examples": (lambda t, x: t * _size(x), TOTAL, X),
    "a sum": (lambda t: t * t, TOTAL),
    "a choice of infinities": (
        lambda t: t * tf.one_hot(1, 4, on_value=1.0, off_value=np.inf),
        TOTAL,
    ),
    "a matrix of constants": (
        lambda t: tf.linalg.matvec(tf.fill((2, 4), 0.25), t),
        TOTAL,
    ),
    "a divisor": (lambda t: t / 4.0, TOTAL),
    "a divisor of 0": (lambda t: t / [1.0, 0.0, 1.0, 1.0], TOTAL),
    "the number of examples as divisor": (lambda t, x: t / _size(x), TOTAL, X),
    "a number found as divisor": (lambda t, x: t / _found(x), TOTAL, X),
    "a sum as divisor": (lambda t, w: w / t, partial_sum(4, low=1.0), W),
    "a divisor that is never 0": (
        lambda t, w: tf.math.divide_no_nan(t, w),
        TOTAL,
        W,
    ),
    "a choice": (lambda t, w: tf.where(w > 0, t, w), TOTAL, W),
    "a choice by the sum": (lambda t, w: tf.where(t > 0, w, w), TOTAL, W),
    "rows": (lambda t, x: t + x, TOTAL, X),
    "a term": (lambda t, w: t - w, TOTAL, W),
    "a term of rows": (lambda t, x: t + tf.reduce_sum(x, 0), TOTAL, X),
    "another result": (lambda t: (tf.exp(t), -t), TOTAL),
    "a smaller result": (lambda t: (tf.exp(t), tf.reduce_sum(t)), TOTAL),
}


test_where_a_sum_meets_it = as_listed(
    "division: factors", FACTORS, exchanges=True
)


# Sums are rounded once, not each term.
CASTS = {
    "a wider float": (lambda t: tf.cast(t, tf.float64), TOTAL),
    "the same": (lambda t: tf.raw_ops.Cast(x=t, DstT=t.dtype), TOTAL),
    "a narrower float": (lambda t: tf.cast(t, tf.float32), DOUBLE),
    "another half": (lambda t: tf.cast(t, tf.bfloat16), HALF),
    "integers": (lambda t: tf.cast(t, tf.int32), TOTAL),
    "a float of integers": (lambda t: tf.cast(t, tf.float32), COUNT),
    "truth values": (lambda t: tf.cast(t, tf.bool), COUNT),
}


test_where_a_sum_is_cast_to = as_listed(
    "division: casts", CASTS, tolerance=2e-2
)


CHOICES = {
    "rows of both": (lambda x, y: x * y, X, X),
    "rows of one": (lambda x, w: w - x, X, W),
    "rows and columns": (lambda x, y: x + tf.transpose(y), X, COLUMNS),
    "pairs of rows": (lambda x: x[:, None] - x[None], X),
    "a row that is broadcast": (lambda x, w: x + w, X, replicated(1, 4)),
    "rows that are one per tower": (
        lambda x: x + tf.reduce_sum(x, 0, keepdims=True),
        X,
    ),
    "no axis": (lambda x: tf.reverse(x, [0]), X),
    "an axis that is not divided": (lambda x: tf.cumsum(x, 0), X),
    "rows beside columns": (lambda x, y: tf.tensordot(x, y, 0), X, COLUMNS),
}


test_which_axis_is_divided = as_listed("division: choices", CHOICES)


# Where the trace knows the number of examples, another size may equal it.
MADE = {
    "ones": (lambda x: x + tf.ones([6, 4]), KNOWN),
    "a range": (lambda x: x * tf.range(6.0)[:, None], KNOWN),
    "ones that are transposed": (
        lambda x: x - tf.transpose(2 * tf.ones([4, 6])),
        KNOWN,
    ),
    "a table of units": (lambda x: x * tf.one_hot(tf.range(6) % 4, 4), KNOWN),
    "a matrix with as many units": (lambda x: x @ tf.ones([4, 6]), KNOWN),
    "its transpose": (lambda x: tf.transpose(x @ tf.ones([4, 6])), KNOWN),
    "ones beside rows": (lambda x: (2 * x, 2 * tf.ones([6, 4])), KNOWN),
    "joined ones": (lambda x: tf.concat([x, tf.fill([6, 4], 2.0)], 0), KNOWN),
    "joined numbers": (
        lambda i: tf.concat([i, tf.fill([6], 1)], 0),
        sharded(-1, dtype="int32", examples=6),
    ),
    "tiled ones": (lambda x, w: x * tf.tile(w[None], [6, 1]), KNOWN, W),
    "reshaped numbers": (
        lambda x: x + tf.reshape(tf.range(24.0), [6, 4]),
        KNOWN,
    ),
}


test_rows_of_what_is_made_from_sizes = as_listed("division: made", MADE)


@pytest.mark.parametrize(
    ("ratio", "hidden", "gathers"),
    [(None, (), False), (32, (), True), (33, (), False), (32, (1,), False)],
)
def test_rows_are_gathered_in_place_of_so_much_larger_sums(
    ratio, hidden, gathers
):
    """A gradient of 60 x 70 entries, for each row of 60 and 70."""

    def function(x, w, v):
        large, small = tf.gradients(tf.tanh(x @ w) @ v, [w, v])
        return large / 3, small

    given = sharded(-1, 60, hidden=hidden), replicated(60, 70)
    program = check_divided(
        function, *given, replicated(70, 1), gather_ratio=ratio
    )
    wanted = {"gather": 2, "sum": 1} if gathers else {"sum": 2}
    assert exchange_counts(program) == wanted
    assert program.replaced_sums == (4 * 60 * 70 if gathers else 0)


def test_over_columns_a_sum_with_several_users_is_added_up_before_them():
    """Each might need an exchange with other columns."""
    steps = (lambda t: 2.0 * t), (lambda t: (2.0 * t, 3.0 * t))
    programs = [laid_out(step, TOTAL, over_columns=True) for step in steps]
    whole = "whole [4]"
    assert [*map(described, programs)] == ["sum of [4]", f"{whole}, {whole}"]
