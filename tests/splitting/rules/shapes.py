"""Operations that ask for shapes, and that fill or repeat by shapes."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.rules.case import Case, floats, ints, of_floats, size

_REPEATS = [
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


def _steps(x, y):
    return tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(x), s1=tf.shape(y))


_SHAPES = [
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
CASES = [*_REPEATS, *_SHAPES]
