"""Operations that put entries elsewhere, or repeat them."""

import tensorflow as tf

from tests.partition.layout.rules.cases.case import axis_size, cases_of


def _reshaped(args, **shapes):
    named = {f"Reshape_{note}": {"shape": s} for note, s in shapes.items()}
    return cases_of(args, **named)


_RESHAPES = [
    *_reshaped("abc", flat=lambda x: [axis_size(x), -1]),
    *_reshaped("abc", all=[-1]),
    *_reshaped("abc", merge=lambda x: [-1, axis_size(x, 2)]),
    *_reshaped("ac", split=lambda x: [axis_size(x), 2, 2]),
    *_reshaped("ab", ones=lambda x: [1, axis_size(x), 1, 3]),
    *_reshaped("ab", blocks=[2, -1, 3], mixed=[3, -1]),
    *_reshaped("ab", pairs=[-1, 2, 3]),
    *_reshaped("abc", ends=lambda x: [-1, 2 * axis_size(x, 1)]),
    *cases_of(
        "abc",
        Reshape_back=lambda x: tf.reshape(tf.reshape(x, [-1]), tf.shape(x)),
    ),
    *cases_of("ab", Reshape_then=lambda x: tf.reshape(tf.transpose(x), [-1])),
]
_MOVES = [
    *cases_of("abc", Transpose={"perm": [2, 0, 1]}),
    *cases_of("abc", Transpose_all=tf.transpose),
    *cases_of("ab:complex64", "ConjugateTranspose", {"perm": [1, 0]}),
    *cases_of("ab", **{f"ExpandDims_{k}": {"axis": k} for k in (0, 1, -1, -2)}),
    *cases_of("a1b", Squeeze_named={"axis": [1]}),
    *cases_of("a1b", Squeeze_all={}),
    *cases_of("ab", Squeeze_none={}),
    *cases_of("abc", ReverseV2={"axis": [1]}, Roll={"shift": 1, "axis": 1}),
    *cases_of(
        "abc, a:whole", "ReverseSequence", {"seq_dim": 1, "batch_dim": 0}
    ),
]
_JOINS = [
    *cases_of(
        "ab, ab",
        Pack=lambda x, y: tf.stack([x, y], 1),
        Pack_last=lambda x, y: tf.stack([x, y], -1),
    ),
    *cases_of("abc", "Unpack", {"num": 3, "axis": 1}),
    *cases_of(
        "abc, abc",
        **{
            f"ConcatV2_{k}": lambda x, y, k=k: tf.concat([x, y], k)
            for k in (0, 1, -1)
        },
    ),
    *cases_of(
        "ab",
        ConcatV2_zeros=lambda x: tf.concat([x, tf.zeros_like(x), x], 0),
        ConcatV2_ones=lambda x: tf.concat([tf.ones_like(x), x], 0),
    ),
    *cases_of("ab, db", ConcatV2_rest=lambda x, y: tf.concat([x, y], 0)),
]
CASES = [*_RESHAPES, *_MOVES, *_JOINS]
