"""Operations that put entries elsewhere, or repeat them."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.kit.long import some_of
from tests.splitting.rules.case import (
    Case,
    exercise,
    floats,
    ints,
    of_floats,
    size,
)

_RESHAPES = [
    of_floats(
        "Reshape",
        "flat",
        lambda x: tf.reshape(x, [size(x, 0), -1]),
        "abc",
        "a",
    ),
    of_floats("Reshape", "all", lambda x: tf.reshape(x, [-1]), "abc", "abc"),
    of_floats(
        "Reshape",
        "merge",
        lambda x: tf.reshape(x, [-1, size(x, 2)]),
        "abc",
        "ab",
    ),
    of_floats(
        "Reshape",
        "last",
        lambda x: tf.reshape(x, [size(x, 0), -1]),
        "abc",
        "a",
    ),
    of_floats(
        "Reshape",
        "split",
        lambda x: tf.reshape(x, [size(x, 0), 2, 2]),
        "ac",
        "a",
    ),
    of_floats(
        "Reshape",
        "blocks",
        lambda x: tf.reshape(x, [2, -1, 3]),
        "ab",
        "",
        letters="a",
    ),
    of_floats(
        "Reshape",
        "ones",
        lambda x: tf.reshape(x, [1, size(x, 0), 1, 3]),
        "ab",
        "a",
        letters="a",
    ),
    of_floats(
        "Reshape",
        "pairs",
        lambda x: tf.reshape(x, [-1, 2, 3]),
        "ab",
        "",
        letters="a",
    ),
    of_floats(
        "Reshape",
        "mixed",
        lambda x: tf.reshape(x, [3, -1]),
        "ab",
        "",
        letters="a",
    ),
    of_floats(
        "Reshape",
        "back",
        lambda x: tf.reshape(tf.reshape(x, [-1]), tf.shape(x)),
        "abc",
        "ab",
    ),
    of_floats(
        "Reshape",
        "ends",
        lambda x: tf.reshape(x, [-1, 2 * size(x, 1)]),
        "abc",
        "",
    ),
    of_floats(
        "Reshape",
        "then",
        lambda x: tf.reshape(tf.transpose(x), [-1]),
        "ab",
        "ab",
    ),
]
_MOVES = [
    of_floats(
        "Transpose", "", lambda x: tf.transpose(x, [2, 0, 1]), "abc", "abc"
    ),
    of_floats("Transpose", "all", tf.transpose, "abc", "abc"),
    Case(
        "ConjugateTranspose",
        lambda x: tf.raw_ops.ConjugateTranspose(x=x, perm=[1, 0]),
        floats("ab", dtype="complex64"),
        "ab",
    ),
    *(
        of_floats(
            "ExpandDims",
            str(k),
            lambda x, k=k: tf.expand_dims(x, k),
            "ab",
            "ab",
        )
        for k in (0, 1, -1, -2)
    ),
    of_floats(
        "Squeeze",
        "named",
        lambda x: tf.squeeze(x, [1]),
        "a1b",
        "ab",
        letters="ab",
    ),
    of_floats(
        "Squeeze",
        "all",
        tf.squeeze,
        "a1b",
        "",
        refuses={"a": "squeezes axes"},
        letters="ab",
    ),
    of_floats(
        "ReverseV2",
        "",
        lambda x: tf.reverse(x, [1]),
        "abc",
        "ac",
        refuses={"b": "to other places"},
    ),
    of_floats(
        "Roll",
        "",
        lambda x: tf.roll(x, 1, 1),
        "abc",
        "ac",
        refuses={"b": "to other places"},
    ),
    Case(
        "ReverseSequence",
        lambda x, n: tf.reverse_sequence(x, n, seq_axis=1, batch_axis=0),
        [*floats("abc"), *ints("a", high=3, kinds="same")],
        "ac",
        {"b": "to other places"},
        letters="ac",
    ),
]


CASES = [*_RESHAPES, *_MOVES]


@pytest.mark.parametrize("case", some_of(CASES), ids=str)
def test_case(case):
    exercise(case)
