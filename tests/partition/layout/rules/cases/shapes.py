"""Operations that ask for shapes, and that fill or repeat by shapes."""

import tensorflow as tf

from tests.partition.layout.rules.cases.case import axis_size, cases_of


def _as_many(k=1):
    return {"Tile_n": {"multiples": lambda x, y: [k * axis_size(y), 2]}}


_REPEATS = [
    *cases_of("abc", "Tile", {"multiples": [2, 1, 3]}),
    *cases_of("ab, ed", **_as_many()),
    *cases_of("1b, ed", **_as_many()),
    *cases_of("ab, ed", **_as_many(2)),
    *cases_of("ab", "BroadcastTo", {"shape": lambda x: [2, axis_size(x), 3]}),
    *cases_of("b, ed", BroadcastTo_n={"shape": lambda x, y: [axis_size(y), 3]}),
    *cases_of("1b, eb", BroadcastTo_other={"shape": lambda x, y: tf.shape(y)}),
    *cases_of("-, ed", "Fill", {"dims": lambda x, y: [axis_size(y), 3]}),
    *cases_of("-", Fill_same={"dims": [2, 3]}),
    *cases_of(
        "ab",
        Empty=lambda x: (
            x + tf.raw_ops.Empty(shape=tf.shape(x), dtype=x.dtype, init=True)
        ),
    ),
    *cases_of("ab", "ZerosLike OnesLike"),
    *cases_of("ab:whole", OneHot=lambda x: tf.one_hot(x, 4)),
    *cases_of(
        "ab:whole, -", "OneHot", {"depth": 4, "off_value": 0.0, "axis": 0}
    ),
    *cases_of(
        "a:whole, e", OneHot_each=lambda x, y: tf.one_hot(x, axis_size(y))
    ),
    *cases_of("ab", Range=lambda x: tf.range(axis_size(x))),
    *cases_of("-", "LinSpace", {"stop": lambda x: x + 1.0, "num": 5}),
]
_SHAPES = [
    *cases_of("ab", "Shape", broadcast=True),
    *cases_of("ab", Shape_one=axis_size),
    *cases_of("ab, bc", ShapeN=lambda x, y: tf.shape_n([x, y])),
    *cases_of("abc", "Size Rank"),
    *cases_of(
        "ab, ab",
        "BroadcastArgs",
        {"s0": lambda x, y: tf.shape(x), "s1": lambda x, y: tf.shape(y)},
        broadcast=True,
    ),
    *cases_of(
        "ab",
        BroadcastArgs_then=lambda x: tf.ones(
            tf.broadcast_dynamic_shape(tf.shape(x), tf.constant([2, 1, 1]))
        ),
    ),
    *cases_of(
        "ab, ab",
        ConcatOffset=lambda x, y: tf.raw_ops.ConcatOffset(
            concat_dim=0, shape=[tf.shape(x), tf.shape(y)]
        ),
    ),
]
CASES = [*_REPEATS, *_SHAPES]
