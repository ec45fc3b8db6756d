"""Operations that join tensors."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.kit.long import some_of
from tests.splitting.rules.case import exercise, of_floats

CASES = [
    of_floats("Pack", "", lambda x, y: tf.stack([x, y], 1), "ab ab", "ab"),
    of_floats("Pack", "last", lambda x, y: tf.stack([x, y], -1), "ab ab", "ab"),
    of_floats(
        "Unpack", "", lambda x: tf.unstack(x, 3, 1), "abc", "ac", letters="ac"
    ),
    *(
        of_floats(
            "ConcatV2",
            str(k),
            lambda x, y, k=k: tf.concat([x, y], k),
            "abc abc",
            "abc",
        )
        for k in (0, 1, -1)
    ),
    of_floats(
        "ConcatV2",
        "zeros",
        lambda x: tf.concat([x, tf.zeros_like(x), x], 0),
        "ab",
        "ab",
    ),
    of_floats(
        "ConcatV2",
        "ones",
        lambda x: tf.concat([tf.ones_like(x), x], 0),
        "ab",
        "ab",
    ),
    of_floats(
        "ConcatV2", "rest", lambda x, y: tf.concat([x, y], 0), "ab db", "b"
    ),
]


@pytest.mark.parametrize("case", some_of(CASES), ids=str)
def test_case(case):
    exercise(case)
