"""Operations that put entries elsewhere, or repeat them."""

from __future__ import annotations

import functools

import tensorflow as tf

from tests.splitting.rules.case import Case, floats, ints, of_floats, size

_reshaped = functools.partial(of_floats, "Reshape")
_joined = functools.partial(of_floats, "ConcatV2")

_RESHAPES = [
    _reshaped("flat", lambda x: tf.reshape(x, [size(x, 0), -1]), "abc", "a"),
    _reshaped("all", lambda x: tf.reshape(x, [-1]), "abc", "abc"),
    _reshaped("merge", lambda x: tf.reshape(x, [-1, size(x, 2)]), "abc", "ab"),
    _reshaped("last", lambda x: tf.reshape(x, [size(x, 0), -1]), "abc", "a"),
    _reshaped("split", lambda x: tf.reshape(x, [size(x, 0), 2, 2]), "ac", "a"),
    _reshaped(
        "blocks", lambda x: tf.reshape(x, [2, -1, 3]), "ab", "", letters="a"
    ),
    _reshaped(
        "ones",
        lambda x: tf.reshape(x, [1, size(x, 0), 1, 3]),
        "ab",
        "a",
        letters="a",
    ),
    _reshaped(
        "pairs", lambda x: tf.reshape(x, [-1, 2, 3]), "ab", "", letters="a"
    ),
    _reshaped("mixed", lambda x: tf.reshape(x, [3, -1]), "ab", "", letters="a"),
    _reshaped(
        "back",
        lambda x: tf.reshape(tf.reshape(x, [-1]), tf.shape(x)),
        "abc",
        "ab",
    ),
    _reshaped("ends", lambda x: tf.reshape(x, [-1, 2 * size(x, 1)]), "abc", ""),
    _reshaped("then", lambda x: tf.reshape(tf.transpose(x), [-1]), "ab", "ab"),
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
_JOINS = [
    of_floats("Pack", "", lambda x, y: tf.stack([x, y], 1), "ab ab", "ab"),
    of_floats("Pack", "last", lambda x, y: tf.stack([x, y], -1), "ab ab", "ab"),
    of_floats(
        "Unpack", "", lambda x: tf.unstack(x, 3, 1), "abc", "ac", letters="ac"
    ),
    *(
        _joined(
            str(k), lambda x, y, k=k: tf.concat([x, y], k), "abc abc", "abc"
        )
        for k in (0, 1, -1)
    ),
    _joined(
        "zeros", lambda x: tf.concat([x, tf.zeros_like(x), x], 0), "ab", "ab"
    ),
    _joined("ones", lambda x: tf.concat([tf.ones_like(x), x], 0), "ab", "ab"),
    _joined("rest", lambda x, y: tf.concat([x, y], 0), "ab db", "b"),
]
CASES = [*_RESHAPES, *_MOVES, *_JOINS]
