"""Operations that put entries elsewhere, or repeat them."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests.splitting.rules.case import Case, exercise, floats, ints


def _case(
    kind: str, note: str, function: Any, axes: str, splits: str, **more: Any
):
    return Case(
        kind, function, floats(*axes.split()), splits, note=note, **more
    )


def _size(x: Any, axis: int) -> Any:
    return tf.shape(x)[axis]


_RESHAPES = [
    _case(
        "Reshape",
        "flat",
        lambda x: tf.reshape(x, [_size(x, 0), -1]),
        "abc",
        "a",
    ),
    _case("Reshape", "all", lambda x: tf.reshape(x, [-1]), "abc", "abc"),
    _case(
        "Reshape",
        "merge",
        lambda x: tf.reshape(x, [-1, _size(x, 2)]),
        "abc",
        "ab",
    ),
    _case(
        "Reshape",
        "last",
        lambda x: tf.reshape(x, [_size(x, 0), -1]),
        "abc",
        "a",
    ),
    _case(
        "Reshape",
        "split",
        lambda x: tf.reshape(x, [_size(x, 0), 2, 2]),
        "ac",
        "a",
    ),
    _case(
        "Reshape",
        "blocks",
        lambda x: tf.reshape(x, [2, -1, 3]),
        "ab",
        "",
        letters="a",
    ),
    _case(
        "Reshape",
        "ones",
        lambda x: tf.reshape(x, [1, _size(x, 0), 1, 3]),
        "ab",
        "a",
        letters="a",
    ),
    _case(
        "Reshape",
        "pairs",
        lambda x: tf.reshape(x, [-1, 2, 3]),
        "ab",
        "",
        letters="a",
    ),
    _case(
        "Reshape",
        "mixed",
        lambda x: tf.reshape(x, [3, -1]),
        "ab",
        "",
        letters="a",
    ),
    _case(
        "Reshape",
        "back",
        lambda x: tf.reshape(tf.reshape(x, [-1]), tf.shape(x)),
        "abc",
        "ab",
    ),
    _case(
        "Reshape",
        "ends",
        lambda x: tf.reshape(x, [-1, 2 * _size(x, 1)]),
        "abc",
        "",
    ),
    _case(
        "Reshape",
        "then",
        lambda x: tf.reshape(tf.transpose(x), [-1]),
        "ab",
        "ab",
    ),
]
_MOVES = [
    _case("Transpose", "", lambda x: tf.transpose(x, [2, 0, 1]), "abc", "abc"),
    _case("Transpose", "all", tf.transpose, "abc", "abc"),
    Case(
        "ConjugateTranspose",
        lambda x: tf.raw_ops.ConjugateTranspose(x=x, perm=[1, 0]),
        floats("ab", dtype="complex64"),
        "ab",
    ),
    *(
        _case(
            "ExpandDims",
            str(k),
            lambda x, k=k: tf.expand_dims(x, k),
            "ab",
            "ab",
        )
        for k in (0, 1, -1, -2)
    ),
    _case(
        "Squeeze",
        "named",
        lambda x: tf.squeeze(x, [1]),
        "a1b",
        "ab",
        letters="ab",
    ),
    _case(
        "Squeeze",
        "all",
        tf.squeeze,
        "a1b",
        "",
        refuses={"a": "squeezes axes"},
        letters="ab",
    ),
    _case(
        "ReverseV2",
        "",
        lambda x: tf.reverse(x, [1]),
        "abc",
        "ac",
        refuses={"b": "to other places"},
    ),
    _case(
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
_REPEATS = [
    _case("Tile", "", lambda x: tf.tile(x, [2, 1, 3]), "abc", "abc"),
    _case(
        "Tile",
        "n",
        lambda x, y: tf.tile(x, [_size(y, 0), 2]),
        "ab ed",
        "e",
        letters="e",
    ),
    _case(
        "Tile",
        "one",
        lambda x, y: tf.tile(x, [_size(y, 0), 2]),
        "1b ed",
        "e",
        letters="e",
    ),
    _case(
        "Tile",
        "twice",
        lambda x, y: tf.tile(x, [2 * _size(y, 0), 2]),
        "ab ed",
        "e",
        letters="e",
    ),
    _case(
        "BroadcastTo",
        "",
        lambda x: tf.broadcast_to(x, [2, _size(x, 0), 3]),
        "ab",
        "a",
        letters="a",
    ),
    _case(
        "BroadcastTo",
        "n",
        lambda x, y: tf.broadcast_to(x, [_size(y, 0), 3]),
        "b ed",
        "e",
        letters="e",
    ),
    _case(
        "BroadcastTo",
        "other",
        lambda x, y: tf.broadcast_to(x, tf.shape(y)),
        "1b eb",
        "e",
        letters="e",
    ),
    Case(
        "Fill", lambda x, y: tf.fill([_size(y, 0), 3], x), floats("", "ed"), "e"
    ),
    Case(
        "Fill",
        lambda x: tf.fill([2, 3], x),
        floats(""),
        letters="",
        note="same",
    ),
    _case("ZerosLike", "", lambda x: tf.raw_ops.ZerosLike(x=x), "ab", "ab"),
    _case("OnesLike", "", lambda x: tf.raw_ops.OnesLike(x=x), "ab", "ab"),
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
        lambda x, y: tf.one_hot(x, _size(y, 0)),
        [*ints("a", scales=False), *floats("e")],
        "a",
        {"e": "one column"},
        note="each",
    ),
    Case(
        "Range",
        lambda x: tf.range(_size(x, 0)),
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
_JOINS = [
    _case("Pack", "", lambda x, y: tf.stack([x, y], 1), "ab ab", "ab"),
    _case("Pack", "last", lambda x, y: tf.stack([x, y], -1), "ab ab", "ab"),
    _case(
        "Unpack", "", lambda x: tf.unstack(x, 3, 1), "abc", "ac", letters="ac"
    ),
    *(
        _case(
            "ConcatV2",
            str(k),
            lambda x, y, k=k: tf.concat([x, y], k),
            "abc abc",
            "abc",
        )
        for k in (0, 1, -1)
    ),
    _case(
        "ConcatV2",
        "zeros",
        lambda x: tf.concat([x, tf.zeros_like(x), x], 0),
        "ab",
        "ab",
    ),
    _case(
        "ConcatV2",
        "ones",
        lambda x: tf.concat([tf.ones_like(x), x], 0),
        "ab",
        "ab",
    ),
    _case("ConcatV2", "rest", lambda x, y: tf.concat([x, y], 0), "ab db", "b"),
    _case("Split", "", lambda x: tf.split(x, 2, 1), "acb", "ab", letters="ab"),
    _case(
        "Split",
        "own",
        lambda x: tf.split(tf.concat([x, x + 1.0], 0), 2, 0),
        "ab",
        "ab",
    ),
    _case(
        "SplitV",
        "",
        lambda x: tf.split(x, [1, 3], 1),
        "acb",
        "ab",
        letters="ab",
    ),
    _case(
        "SplitV",
        "own",
        lambda x: tf.split(
            tf.concat([x, x, x], 0), [_size(x, 0), 2 * _size(x, 0)], 0
        ),
        "ab",
        "ab",
    ),
]


def _slice(
    note: str, function: Any, axes: str, splits: str, **more: Any
) -> Case:
    return _case("StridedSlice", note, function, axes, splits, **more)


_SOME = "some of the examples"
_SLICES = [
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
        lambda x: tf.concat([x, x + 1.0], 0)[: _size(x, 0)],
        "ab",
        "a",
        letters="a",
    ),
    _slice(
        "end",
        lambda x: tf.concat([x, x + 1.0], 0)[-_size(x, 0) :],
        "ab",
        "a",
        letters="a",
    ),
    _slice(
        "middle",
        lambda x: tf.concat([x, x + 1.0, x], 0)[_size(x, 0) : 2 * _size(x, 0)],
        "ab",
        "a",
        letters="a",
    ),
    _slice(
        "far", lambda x: x[_size(x, 0) : 3 * _size(x, 0)], "ab", "", letters="a"
    ),
    _slice("by n", lambda c, x: c[: _size(x, 0)], "e ab", "", letters="a"),
    _slice(
        "at n",
        lambda c, x: tf.concat([c, c, c], 0)[_size(x, 0)],
        "e ab",
        "",
        letters="a",
    ),
    _slice(
        "from n",
        lambda c, x: tf.concat([c, c, c], 0)[_size(x, 0) - 1 :],
        "e ab",
        "",
        letters="a",
    ),
    _slice("own end", lambda x: x[: _size(x, 0)], "ab", "ab"),
]


def _gradient(function: Any) -> Any:
    def apply(x: Any, dy: Any) -> Any:
        return tf.gradients(function(x), [x], [dy])

    return apply


_GRADIENTS = [
    _case(
        "StridedSliceGrad",
        "other",
        _gradient(lambda x: x[:, 1:3]),
        "acb adb",
        "ab",
        letters="ab",
    ),
    _case(
        "StridedSliceGrad",
        "dropped",
        _gradient(lambda x: x[:, 1]),
        "acb ab",
        "ab",
        letters="ab",
    ),
    _case(
        "StridedSliceGrad",
        "new",
        _gradient(lambda x: x[:, None]),
        "ac a1c",
        "ac",
    ),
    _case(
        "StridedSliceGrad",
        "dots",
        _gradient(lambda x: x[..., 0]),
        "acb ac",
        "ac",
        letters="ac",
    ),
    _case(
        "StridedSliceGrad", "first", _gradient(lambda x: x[0]), "acb cb", "cb"
    ),
    _case(
        "StridedSliceGrad",
        "half",
        lambda x, dy: tf.gradients(
            tf.concat([x, x], 0)[: _size(x, 0)], [x], [dy]
        ),
        "ab ab",
        "",
        letters="a",
    ),
    _case(
        "StridedSliceGrad",
        "at n",
        lambda c, x: tf.gradients(tf.concat([c, c, c], 0)[_size(x, 0)], [c]),
        "e ab",
        "",
        letters="a",
    ),
]
_PARTS = [
    _case(
        "Slice",
        "other",
        lambda x: tf.slice(x, [0, 1, 0], [-1, 2, -1]),
        "acb",
        "ab",
        letters="ab",
    ),
    _case(
        "Slice",
        "some",
        lambda x: tf.slice(x, [0, 1], [2, 2]),
        "ec",
        "",
        refuses={"e": _SOME},
        letters="e",
    ),
    _case(
        "Slice",
        "own",
        lambda x: tf.slice(x, [0, 1], [_size(x, 0), 2]),
        "ac",
        "a",
        letters="a",
    ),
    _case(
        "Slice",
        "half",
        lambda x: tf.slice(
            tf.concat([x, x], 0), [_size(x, 0), 0], [_size(x, 0), 2]
        ),
        "ac",
        "a",
        letters="a",
    ),
    _case(
        "Slice",
        "at n",
        lambda c, x: tf.slice(tf.concat([c, c, c], 0), [_size(x, 0)], [1]),
        "e ab",
        "",
        letters="a",
    ),
    _case(
        "Pad",
        "",
        lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 0]]),
        "acb",
        "ab",
        letters="ab",
    ),
    _case(
        "Pad",
        "own",
        lambda x: tf.pad(x, [[1, 0], [1, 2]]),
        "ac",
        "",
        letters="a",
    ),
    _case(
        "Pad",
        "blocks",
        lambda x: tf.pad(x, [[_size(x, 0), 0], [0, 0]]),
        "ac",
        "a",
        letters="a",
    ),
    _case(
        "Pad",
        "by n",
        lambda c, x: tf.pad(c, [[_size(x, 0), 0]]),
        "e ab",
        "",
        letters="a",
    ),
    *(
        _case(
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
    _case(
        "MirrorPad",
        "",
        lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 0]], "REFLECT"),
        "acb",
        "ab",
        letters="ab",
    ),
    _case(
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
CASES = [
    *_RESHAPES,
    *_MOVES,
    *_REPEATS,
    *_JOINS,
    *_SLICES,
    *_GRADIENTS,
    *_PARTS,
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    exercise(case)
