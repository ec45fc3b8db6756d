"""Operations that ask for shapes, and that fill or repeat by shapes."""

import tensorflow as tf

from tests.partition.rules.cases.case import cases, size


def _as_many(k=1):
    return {"Tile-n": {"multiples": lambda x, y: [k * size(y), 2]}}


_REPEATS = [
    *cases("abc", "Tile", {"multiples": [2, 1, 3]}),
    *cases("ab, ed", _as_many()),
    *cases("1b, ed", _as_many()),
    *cases("ab, ed", _as_many(2)),
    *cases("ab", "BroadcastTo", {"shape": lambda x: [2, size(x), 3]}),
    *cases("b, ed", {"BroadcastTo-n": {"shape": lambda x, y: [size(y), 3]}}),
    *cases(
        "1b, eb", {"BroadcastTo-other": {"shape": lambda x, y: tf.shape(y)}}
    ),
    *cases("-, ed", "Fill", {"dims": lambda x, y: [size(y), 3]}),
    *cases("-", {"Fill-same": {"dims": [2, 3]}}),
    *cases(
        "ab",
        {
            "Empty": lambda x: (
                x
                + tf.raw_ops.Empty(shape=tf.shape(x), dtype=x.dtype, init=True)
            )
        },
    ),
    *cases("ab", "ZerosLike OnesLike"),
    *cases("ab:whole", {"OneHot": lambda x: tf.one_hot(x, 4)}),
    *cases("ab:whole, -", "OneHot", {"depth": 4, "off_value": 0.0, "axis": 0}),
    *cases("a:whole, e", {"OneHot-each": lambda x, y: tf.one_hot(x, size(y))}),
    *cases("ab", {"Range": lambda x: tf.range(size(x))}),
    *cases("-", "LinSpace", {"stop": lambda x: x + 1.0, "num": 5}),
]
_SHAPES = [
    *cases("ab", "Shape", broadcast=True),
    *cases("ab", {"Shape-one": size}),
    *cases("ab, bc", {"ShapeN": lambda x, y: tf.shape_n([x, y])}),
    *cases("abc", "Size Rank"),
    *cases(
        "ab, ab",
        "BroadcastArgs",
        {"s0": lambda x, y: tf.shape(x), "s1": lambda x, y: tf.shape(y)},
        broadcast=True,
    ),
    *cases(
        "ab",
        {
            "BroadcastArgs-then": lambda x: tf.ones(
                tf.broadcast_dynamic_shape(tf.shape(x), tf.constant([2, 1, 1]))
            )
        },
    ),
    *cases(
        "ab, ab",
        {
            "ConcatOffset": lambda x, y: tf.raw_ops.ConcatOffset(
                concat_dim=0, shape=[tf.shape(x), tf.shape(y)]
            )
        },
    ),
]
CASES = [*_REPEATS, *_SHAPES]
