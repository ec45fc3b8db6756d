"""Operations that take a part of a tensor, or put it back."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tests.splitting.rules.case import Case, floats, of_floats, size

_slice = functools.partial(of_floats, "StridedSlice")
_put_back = functools.partial(of_floats, "StridedSliceGrad")
_taken = functools.partial(of_floats, "Slice")
_padded = functools.partial(of_floats, "Pad")
_SOME = "some of the examples"


def _twice(x: Any) -> Any:
    return tf.repeat(x, 2, 0)


def _cropped(x: Any, axis: int = 1) -> Any:
    """Take two entries from where nobody knows, the same for all towers."""
    begin = tf.random.stateless_uniform([], [1, 2], 0, 2, tf.int32)
    if axis:
        return x[:, begin : begin + 2]
    return x[begin : begin + 2]


def _cropped_gradient(x: Any) -> Any:
    return tf.gradients(_cropped(x) ** 2, x)[0]


_SLICES = [
    _slice("somewhere", _cropped, "acb", "ab", letters="ab"),
    _put_back("somewhere", _cropped_gradient, "acb", "ab", letters="ab"),
    Case(
        "StridedSlice",
        functools.partial(_cropped, axis=0),
        floats("acb"),
        "",
        {"a": "some of the examples"},
        letters="a",
        note="rows from somewhere",
    ),
    _slice("other", lambda x: x[:, 1:3], "acb", "ab", letters="ab"),
    _slice("dropped", lambda x: x[:, 1], "acb", "ab", letters="ab"),
    _slice("new", lambda x: x[:, None, ..., 1:], "acb", "ac", letters="ac"),
    _slice("dots", lambda x: x[..., 0], "acb", "ac", letters="ac"),
    _slice("back", lambda x: x[:, ::-1], "acb", "ab", letters="ab"),
    _slice("all", lambda x: x[:], "acb", "acb"),
    _slice("first", lambda x: x[0], "acb", "cb", refuses={"a": "one example"}),
    _slice("last", lambda x: x[-1], "acb", "cb", refuses={"a": "one example"}),
    _slice(
        "reversed", lambda x: x[::-1], "acb", "cb", refuses={"a": "reverses"}
    ),
    _slice("some", lambda x: x[:2], "ecb", "cb", refuses={"e": _SOME}),
    _slice("without", lambda x: x[1:], "ecb", "cb", refuses={"e": _SOME}),
    _slice(
        "every", lambda x: x[::2], "ecb", "cb", refuses={"e": "every other"}
    ),
    _slice(
        "half",
        lambda x: tf.concat([x, x + 1.0], 0)[: size(x, 0)],
        "ab",
        "a",
        letters="a",
    ),
    _slice(
        "end",
        lambda x: tf.concat([x, x + 1.0], 0)[-size(x, 0) :],
        "ab",
        "a",
        letters="a",
    ),
    _slice(
        "middle",
        lambda x: tf.concat([x, x + 1.0, x], 0)[size(x, 0) : 2 * size(x, 0)],
        "ab",
        "a",
        letters="a",
    ),
    _slice(
        "far", lambda x: x[size(x, 0) : 3 * size(x, 0)], "ab", "", letters="a"
    ),
    _slice("by n", lambda c, x: c[: size(x, 0)], "e ab", "", letters="a"),
    _slice(
        "at n",
        lambda c, x: tf.concat([c, c, c], 0)[size(x, 0)],
        "e ab",
        "",
        letters="a",
    ),
    _slice(
        "from n",
        lambda c, x: tf.concat([c, c, c], 0)[size(x, 0) - 1 :],
        "e ab",
        "",
        letters="a",
    ),
    _slice("own end", lambda x: x[: size(x, 0)], "ab", "ab"),
    _slice("of each", lambda x: _twice(x)[1::2], "ab", "a", letters="a"),
    _slice("of pairs", lambda x: _twice(x)[::4], "ab", "", letters="a"),
    _slice("of each but", lambda x: _twice(x)[2::2], "ab", "", letters="a"),
    _slice(
        "of blocks", lambda x: tf.concat([x, x], 0)[::2], "ab", "", letters="a"
    ),
]


def _gradient(function: Any) -> Any:
    def apply(x: Any, dy: Any) -> Any:
        return tf.gradients(function(x), [x], [dy])

    return apply


_GRADIENTS = [
    _put_back(
        "other", _gradient(lambda x: x[:, 1:3]), "acb adb", "ab", letters="ab"
    ),
    _put_back(
        "dropped", _gradient(lambda x: x[:, 1]), "acb ab", "ab", letters="ab"
    ),
    _put_back("new", _gradient(lambda x: x[:, None]), "ac a1c", "ac"),
    _put_back(
        "dots", _gradient(lambda x: x[..., 0]), "acb ac", "ac", letters="ac"
    ),
    _put_back("first", _gradient(lambda x: x[0]), "acb cb", "cb"),
    _put_back(
        "of each",
        lambda x, dy: tf.gradients(_twice(x)[1::2], [x], [dy]),
        "ab ab",
        "a",
        letters="a",
    ),
    _put_back(
        "half",
        lambda x, dy: tf.gradients(
            tf.concat([x, x], 0)[: size(x, 0)], [x], [dy]
        ),
        "ab ab",
        "",
        letters="a",
    ),
    _put_back(
        "at n",
        lambda c, x: tf.gradients(tf.concat([c, c, c], 0)[size(x, 0)], [c]),
        "e ab",
        "",
        letters="a",
    ),
]


_PARTS = [
    _taken(
        "other",
        lambda x: tf.slice(x, [0, 1, 0], [-1, 2, -1]),
        "acb",
        "ab",
        letters="ab",
    ),
    _taken(
        "some",
        lambda x: tf.slice(x, [0, 1], [2, 2]),
        "ec",
        "",
        refuses={"e": _SOME},
        letters="e",
    ),
    _taken(
        "own",
        lambda x: tf.slice(x, [0, 1], [size(x, 0), 2]),
        "ac",
        "a",
        letters="a",
    ),
    _taken(
        "half",
        lambda x: tf.slice(
            tf.concat([x, x], 0), [size(x, 0), 0], [size(x, 0), 2]
        ),
        "ac",
        "a",
        letters="a",
    ),
    _taken(
        "at n",
        lambda c, x: tf.slice(tf.concat([c, c, c], 0), [size(x, 0)], [1]),
        "e ab",
        "",
        letters="a",
    ),
    _padded(
        "",
        lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 0]]),
        "acb",
        "ab",
        letters="ab",
    ),
    _padded(
        "own", lambda x: tf.pad(x, [[1, 0], [1, 2]]), "ac", "", letters="a"
    ),
    _padded(
        "blocks",
        lambda x: tf.pad(x, [[size(x, 0), 0], [0, 0]]),
        "ac",
        "a",
        letters="a",
    ),
    _padded(
        "by n",
        lambda c, x: tf.pad(c, [[size(x, 0), 0]]),
        "e ab",
        "",
        letters="a",
    ),
    *(
        of_floats(
            "PadV2",
            str(fill),
            lambda x, fill=fill: tf.pad(
                x, [[0, 0], [1, 2], [0, 0]], constant_values=fill
            ),
            "acb",
            "ab",
            letters="ab",
        )
        for fill in (1.0, -2.0)
    ),
    Case(
        "PadV2",
        lambda x, fill: tf.pad(
            x, [[0, 0], [1, 2], [0, 0]], constant_values=fill
        ),
        floats("acb", ""),
        "ab",
        letters="ab",
        note="given",
    ),
    of_floats(
        "MirrorPad",
        "",
        lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 0]], "REFLECT"),
        "acb",
        "ab",
        letters="ab",
    ),
    of_floats(
        "MirrorPadGrad",
        "",
        lambda x: tf.raw_ops.MirrorPadGrad(
            input=x, paddings=[[0, 0], [1, 1], [0, 0]], mode="REFLECT"
        ),
        "aeb",
        "ab",
        letters="ab",
    ),
]


_SPLITS = [
    of_floats(
        "Split", "", lambda x: tf.split(x, 2, 1), "acb", "ab", letters="ab"
    ),
    of_floats(
        "Split",
        "own",
        lambda x: tf.split(tf.concat([x, x + 1.0], 0), 2, 0),
        "ab",
        "ab",
    ),
    of_floats(
        "SplitV",
        "",
        lambda x: tf.split(x, [1, 3], 1),
        "acb",
        "ab",
        letters="ab",
    ),
    of_floats(
        "SplitV",
        "own",
        lambda x: tf.split(
            tf.concat([x, x, x], 0), [size(x, 0), 2 * size(x, 0)], 0
        ),
        "ab",
        "ab",
    ),
]
CASES = [*_SPLITS, *_SLICES, *_GRADIENTS, *_PARTS]
