"""Operations that take a part of a tensor, or put it back."""

import tensorflow as tf
from keras import ops

from tests.partition.layout.rules.cases.case import (
    axis_size,
    cases_of,
    gradient_of,
)


def _again(x):
    return tf.repeat(x, 2, 0)


def _blocks(*values):
    return tf.concat(values, 0)


def _cropped(x):
    """Take two entries from where nobody knows."""
    begin = tf.random.stateless_uniform([], [1, 2], 0, 2, tf.int32)
    return x[:, begin : begin + 2]


def _updated(x, update):
    """Overwrite two entries somewhere."""
    begin = tf.random.stateless_uniform([3], [1, 2], 0, 2, tf.int32)
    return ops.slice_update(x, begin, update)


def _cropped_rows(x):
    begin = tf.random.stateless_uniform([], [1, 2], 0, 2, tf.int32)
    return x[begin : begin + 2]


def _named(type, functions):
    return {f"{type}_{note}": f for note, f in functions.items()}


def _slices(args, **functions):
    return cases_of(args, **_named("StridedSlice", functions))


def _put_back(args, **functions):
    return cases_of(args, **_named("StridedSliceGrad", functions))


_SLICES = [
    *cases_of("acb, adb", XlaDynamicUpdateSlice=_updated),
    *_slices(
        "acb",
        somewhere=_cropped,
        rows_from_somewhere=_cropped_rows,
        other=lambda x: x[:, 1:3],
        dropped=lambda x: x[:, 1],
        back=lambda x: x[:, ::-1],
        new=lambda x: x[:, None, ..., 1:],
        dots=lambda x: x[..., 0],
        all=lambda x: x[:],
        first=lambda x: x[0],
        last=lambda x: x[-1],
        reversed=lambda x: x[::-1],
    ),
    *_slices(
        "ecb",
        some=lambda x: x[:2],
        without=lambda x: x[1:],
        every=lambda x: x[::2],
    ),
    *_slices(
        "ab",
        half=lambda x: _blocks(x, x + 1.0)[: axis_size(x)],
        end=lambda x: _blocks(x, x + 1.0)[-axis_size(x) :],
        middle=lambda x: _blocks(x, x + 1.0, x)[
            axis_size(x) : 2 * axis_size(x)
        ],
        of_each=lambda x: _again(x)[1::2],
        own_end=lambda x: x[: axis_size(x)],
        far=lambda x: x[axis_size(x) : 3 * axis_size(x)],
        of_pairs=lambda x: _again(x)[::4],
        of_each_but=lambda x: _again(x)[2::2],
        of_blocks=lambda x: _blocks(x, x)[::2],
    ),
    *_slices(
        "e, ab",
        by_n=lambda c, x: c[: axis_size(x)],
        at_n=lambda c, x: _blocks(c, c, c)[axis_size(x)],
        from_n=lambda c, x: _blocks(c, c, c)[axis_size(x) - 1 :],
    ),
]
_GRADIENTS = [
    *_put_back("acb", somewhere=lambda x: tf.gradients(_cropped(x) ** 2, x)[0]),
    *_put_back("acb, adb", other=gradient_of(lambda x: x[:, 1:3])),
    *_put_back("acb, ab", dropped=gradient_of(lambda x: x[:, 1])),
    *_put_back("ac, a1c", new=gradient_of(lambda x: x[:, None])),
    *_put_back("acb, ac", dots=gradient_of(lambda x: x[..., 0])),
    *_put_back("acb, cb", first=gradient_of(lambda x: x[0])),
    *_put_back("ab, ab", of_each=gradient_of(lambda x: _again(x)[1::2])),
    *_put_back(
        "ab, ab", half=gradient_of(lambda x: _blocks(x, x)[: axis_size(x)])
    ),
    *_put_back(
        "e, ab",
        at_n=lambda c, x: tf.gradients(_blocks(c, c, c)[axis_size(x)], [c]),
    ),
]
_WIDTHS = [[0, 0], [1, 2], [0, 0]]
_PARTS = [
    *cases_of(
        "acb",
        Slice_other=lambda x: tf.slice(x, [0, 1, 0], [-1, 2, -1]),
        Pad={"paddings": _WIDTHS},
        PadV2_1={"paddings": _WIDTHS, "constant_values": 1.0},
        PadV2_minus_2={"paddings": _WIDTHS, "constant_values": -2.0},
        MirrorPad={"paddings": _WIDTHS, "mode": "REFLECT"},
        Split=lambda x: tf.split(x, 2, 1),
        SplitV=lambda x: tf.split(x, [1, 3], 1),
    ),
    *cases_of("acb, -", "PadV2", {"paddings": _WIDTHS}),
    *cases_of(
        "aeb",
        "MirrorPadGrad",
        {"paddings": [[0, 0], [1, 1], [0, 0]], "mode": "REFLECT"},
    ),
    *cases_of("ec", Slice_some={"begin": [0, 1], "size": [2, 2]}),
    *cases_of(
        "ac",
        Slice_own=lambda x: tf.slice(x, [0, 1], [axis_size(x), 2]),
        Slice_half=lambda x: tf.slice(
            _blocks(x, x), [axis_size(x), 0], [axis_size(x), 2]
        ),
        Pad_blocks=lambda x: tf.pad(x, [[axis_size(x), 0], [0, 0]]),
    ),
    *cases_of("ac", Pad_own={"paddings": [[1, 0], [1, 2]]}),
    *cases_of(
        "e, ab",
        Slice_at_n=lambda c, x: tf.slice(_blocks(c, c, c), [axis_size(x)], [1]),
        Pad_by_n=lambda c, x: tf.pad(c, [[axis_size(x), 0]]),
    ),
    *cases_of(
        "ab",
        Split_own=lambda x: tf.split(_blocks(x, x + 1.0), 2, 0),
        SplitV_own=lambda x: tf.split(
            _blocks(x, x, x), [axis_size(x), 2 * axis_size(x)], 0
        ),
    ),
]
CASES = [*_SLICES, *_GRADIENTS, *_PARTS]
