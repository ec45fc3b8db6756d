"""Operations that repeat entries."""

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

CASES = [
    of_floats("Tile", "", lambda x: tf.tile(x, [2, 1, 3]), "abc", "abc"),
    *(
        of_floats(
            "Tile",
            f"{axes} {k}n",
            lambda x, y, k=k: tf.tile(x, [k * size(y, 0), 2]),
            f"{axes} ed",
            "e",
            letters="e",
        )
        for axes, k in (("ab", 1), ("1b", 1), ("ab", 2))
    ),
    of_floats(
        "BroadcastTo",
        "",
        lambda x: tf.broadcast_to(x, [2, size(x, 0), 3]),
        "ab",
        "a",
        letters="a",
    ),
    of_floats(
        "BroadcastTo",
        "n",
        lambda x, y: tf.broadcast_to(x, [size(y, 0), 3]),
        "b ed",
        "e",
        letters="e",
    ),
    of_floats(
        "BroadcastTo",
        "other",
        lambda x, y: tf.broadcast_to(x, tf.shape(y)),
        "1b eb",
        "e",
        letters="e",
    ),
    Case(
        "Fill", lambda x, y: tf.fill([size(y, 0), 3], x), floats("", "ed"), "e"
    ),
    Case(
        "Fill",
        lambda x: tf.fill([2, 3], x),
        floats(""),
        letters="",
        note="same",
    ),
    of_floats(
        "Empty",
        "",
        lambda x: (
            x + tf.raw_ops.Empty(shape=tf.shape(x), dtype=tf.float32, init=True)
        ),
        "ab",
        "ab",
    ),
    of_floats("ZerosLike", "", lambda x: tf.raw_ops.ZerosLike(x=x), "ab", "ab"),
    of_floats("OnesLike", "", lambda x: tf.raw_ops.OnesLike(x=x), "ab", "ab"),
    Case("OneHot", lambda x: tf.one_hot(x, 4), ints("ab", scales=False), "ab"),
    Case(
        "OneHot",
        lambda x, on: tf.one_hot(x, 4, on, 0.0, axis=0),
        [*ints("ab", scales=False), *floats("")],
        "ab",
        note="on",
    ),
    Case(
        "OneHot",
        lambda x, y: tf.one_hot(x, size(y, 0)),
        [*ints("a", scales=False), *floats("e")],
        "a",
        {"e": "one column"},
        note="each",
    ),
    Case(
        "Range",
        lambda x: tf.range(size(x, 0)),
        floats("ab"),
        "b",
        {"a": "numbers the examples"},
    ),
    Case(
        "LinSpace",
        lambda x: tf.raw_ops.LinSpace(start=x, stop=x + 1.0, num=5),
        floats(""),
        letters="",
    ),
]


@pytest.mark.parametrize("case", some_of(CASES), ids=str)
def test_case(case):
    exercise(case)
