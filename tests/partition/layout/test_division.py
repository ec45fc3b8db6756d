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
    "a constant": lambda total: 2.0 * total,
    "an infinite constant": lambda total: total * [1, 2, 3, np.inf],
    "a weight": lambda total, w: total * w,
    "a bounded function": lambda total, w: total * tf.tanh(w),
    "an unbounded function": lambda total, w: total * tf.exp(w),
    "what is moved": lambda total, w: (
        total * tf.reshape(tf.stack([tf.sin(w)]), [4])
    ),
    "what is moved of a weight": lambda total, w: (
        total * tf.concat([tf.sin(w[:2]), w[2:]], 0)
    ),
    "integers": lambda total, whole: total * tf.cast(whole, total.dtype),
    "integers as halves": lambda half, whole: half * tf.cast(whole, half.dtype),
    "a wider float": lambda double: (
        double * tf.cast(tf.constant([1.0, 2, 3, 4]), double.dtype)
    ),
    "a narrower float": lambda total, w: (
        total * tf.cast(tf.sin(tf.cast(w, tf.float64)), total.dtype)
    ),
    "the number of examples": lambda total, x: total * _size(x),
    "a sum": lambda total: total * total,
    "a choice of infinities": lambda total: (
        total * tf.one_hot(1, 4, on_value=1.0, off_value=np.inf)
    ),
    "a matrix of constants": lambda total: tf.linalg.matvec(
        tf.fill((2, 4), 0.25), total
    ),
    "a divisor": lambda total: total / 4.0,
    "a divisor of 0": lambda total: total / [1.0, 0.0, 1.0, 1.0],
    "the number of examples as divisor": lambda total, x: total / _size(x),
    "a number found as divisor": lambda total, x: total / _found(x),
    "a sum as divisor": (lambda t, w: w / t, partial_sum(4, low=1.0), W),
    "a divisor that is never 0": lambda total, w: tf.math.divide_no_nan(
        total, w
    ),
    "a choice": lambda total, w: tf.where(w > 0, total, w),
    "a choice by the sum": lambda total, w: tf.where(total > 0, w, w),
    "rows": lambda total, x: total + x,
    "a term": lambda total, w: total - w,
    "a term of rows": lambda total, x: total + tf.reduce_sum(x, 0),
    "another result": lambda total: (tf.exp(total), -total),
    "a smaller result": lambda total: (tf.exp(total), tf.reduce_sum(total)),
}


test_where_a_sum_meets_it = as_listed(
    "division: factors", FACTORS, exchanges=True
)


# Sums are rounded once, not each term.
CASTS = {
    "a wider float": lambda total: tf.cast(total, tf.float64),
    "the same": lambda total: tf.raw_ops.Cast(x=total, DstT=total.dtype),
    "a narrower float": lambda double: tf.cast(double, tf.float32),
    "another half": lambda half: tf.cast(half, tf.bfloat16),
    "integers": lambda total: tf.cast(total, tf.int32),
    "a float of integers": lambda count: tf.cast(count, tf.float32),
    "truth values": lambda count: tf.cast(count, tf.bool),
}


test_where_a_sum_is_cast_to = as_listed(
    "division: casts", CASTS, tolerance=2e-2
)


CHOICES = {
    "rows of both": (lambda x, y: x * y, X, X),
    "rows of one": lambda x, w: w - x,
    "rows and columns": lambda x, columns: x + tf.transpose(columns),
    "pairs of rows": lambda x: x[:, None] - x[None],
    "a row that is broadcast": (lambda x, w: x + w, X, replicated(1, 4)),
    "rows that are one per tower": lambda x: (
        x + tf.reduce_sum(x, 0, keepdims=True)
    ),
    "no axis": lambda x: tf.reverse(x, [0]),
    "an axis that is not divided": lambda x: tf.cumsum(x, 0),
    "rows beside columns": lambda x, columns: tf.tensordot(x, columns, 0),
}


test_which_axis_is_divided = as_listed("division: choices", CHOICES)


# Where the trace knows the number of examples, another size may equal it.
MADE = {
    "ones": lambda known: known + tf.ones([6, 4]),
    "a range": lambda known: known * tf.range(6.0)[:, None],
    "ones that are transposed": lambda known: (
        known - tf.transpose(2 * tf.ones([4, 6]))
    ),
    "a table of units": lambda known: known * tf.one_hot(tf.range(6) % 4, 4),
    "a matrix with as many units": lambda known: known @ tf.ones([4, 6]),
    "its transpose": lambda known: tf.transpose(known @ tf.ones([4, 6])),
    "ones beside rows": lambda known: (2 * known, 2 * tf.ones([6, 4])),
    "joined ones": lambda known: tf.concat([known, tf.fill([6, 4], 2.0)], 0),
    "joined numbers": (
        lambda i: tf.concat([i, tf.fill([6], 1)], 0),
        sharded(-1, dtype="int32", examples=6),
    ),
    "tiled ones": lambda known, w: known * tf.tile(w[None], [6, 1]),
    "reshaped numbers": lambda known: (
        known + tf.reshape(tf.range(24.0), [6, 4])
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
