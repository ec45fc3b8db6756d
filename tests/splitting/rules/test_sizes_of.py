"""Asking for shapes."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.kit.long import some_of
from tests.splitting.rules.case import Case, exercise, floats


def _steps(x, y):
    return tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(x), s1=tf.shape(y))


CASES = [
    Case("Shape", tf.shape, floats("ab"), broadcast=True),
    Case("Shape", lambda x: tf.shape(x)[0], floats("ab"), "ab", note="one"),
    Case("ShapeN", lambda x, y: tf.shape_n([x, y]), floats("ab", "bc")),
    Case("Size", lambda x: tf.size(x), floats("abc"), "abc"),
    Case("Rank", lambda x: tf.raw_ops.Rank(input=x), floats("abc"), "abc"),
    Case(
        "BroadcastArgs",
        lambda x, y: tf.broadcast_dynamic_shape(tf.shape(x), tf.shape(y)),
        floats("ab", "ab"),
        broadcast=True,
    ),
    Case(
        "BroadcastGradientArgs",
        _steps,
        floats("ab", "ab"),
        broadcast=True,
        towers=[(5, 2)],
    ),
    Case(
        "BroadcastArgs",
        lambda x: tf.ones(
            tf.broadcast_dynamic_shape(tf.shape(x), tf.constant([2, 1, 1]))
        ),
        floats("ab"),
        "ab",
        note="then",
    ),
    Case(
        "ConcatOffset",
        lambda x, y: tf.raw_ops.ConcatOffset(
            concat_dim=0, shape=[tf.shape(x), tf.shape(y)]
        ),
        floats("ab", "ab"),
    ),
]


@pytest.mark.parametrize("case", some_of(CASES), ids=str)
def test_case(case):
    exercise(case)
