"""Arithmetic on sizes while a step is laid out, against TensorFlow's."""

import contextlib

import pytest
import tensorflow as tf

from keras_towers.partition.ir.registry import OPERATIONS
from keras_towers.partition.ir.sizes import UNKNOWN
from tests.partition.kit import (
    OneDeviceFails,
    check_on_towers,
    laid_out,
    results_of,
    sharded,
    trace,
)
from tests.partition.layout.rules.cases.case import raw_op
from tests.partition.layout_list import Section

pytestmark = pytest.mark.alternate

_N = sharded(-1, 3)


def _binary(function):
    """A function of the number of examples and of what it meets, both ways."""
    return lambda n: (
        function(n, 1),
        function(n, 2),
        function(n, n),
        function(2 * n, n),
        function(tf.constant(7), 3),
        function(n, tf.constant([1, 0, 7])),
    )


def _unary(function):
    return lambda n: (function(n), function(-2 * n), function(tf.constant(-3)))


_NUMBERS = {
    **{
        name: _binary(raw_op(name))
        for name in (
            *("Add", "AddV2", "Sub", "Mul", "Maximum", "Minimum", "Less"),
            *("LessEqual", "Greater", "Equal", "NotEqual"),
        )
    },
    # A product may wrap around in 32 bits.
    "GreaterEqual": lambda n: (
        *_binary(raw_op("GreaterEqual"))(n),
        2 * n >= 0,
        2 * tf.cast(n, tf.int64) >= 0,
    ),
    **{
        name: _unary(raw_op(name))
        for name in (
            *("Neg", "Abs", "Square", "ZerosLike", "OnesLike", "Identity"),
            *("Snapshot", "StopGradient"),
        )
    },
    "FloorDiv": lambda n: (n // 2, 4 * n // 2, n // n, 3 * n // n, 7 // n),
    "FloorMod": lambda n: (n % 2, 4 * n % 2, 3 * n % n, 7 % n, n % 1),
    "LogicalAnd": lambda n: (
        tf.logical_and(n > 0, n > 0),
        tf.logical_and(n > 0, n < 0),
        tf.logical_and(n > 3, n < 0),
    ),
    "LogicalOr": lambda n: (
        tf.logical_or(n > 0, n > 3),
        tf.logical_or(n < 0, n >= 0),
    ),
    "LogicalNot": lambda n: (tf.logical_not(n > 0), tf.logical_not(n >= 0)),
    "SelectV2": lambda n: (
        tf.where(n > 0, n, 2),
        tf.where(n > 3, n, 2),
        tf.where(n > 3, n, n),
    ),
    "Select": lambda n: (
        tf.raw_ops.Select(condition=n >= 0, x=n, y=2 * n),
        tf.raw_ops.Select(
            condition=tf.stack([n >= 0, n < 0]),
            x=tf.stack([[n, 1], [n, 2]]),
            y=tf.stack([[3, n], [4, n]]),
        ),
    ),
    "Cast": lambda n: (
        tf.cast(n, tf.int64),
        tf.cast(n, tf.bool),
        tf.cast(n > 0, tf.int32),
        tf.cast(tf.constant(300) + 0 * n, tf.int8),
    ),
}
_SHAPES = {
    "Pack": lambda n: (tf.stack([n, 3]), tf.stack([[n, 3], [2, n]], 1)),
    "Unpack": lambda n: tf.unstack(tf.stack([[n, 3], [2, n]]), axis=1),
    "ConcatV2": lambda n: tf.concat([[n], [4, 2], [2 * n]], 0),
    "StridedSlice": lambda n: (
        tf.stack([n, 3, 2])[1:],
        tf.stack([n, 3, 2])[-1],
        tf.stack([n, 3, 2])[::-1],
        tf.stack([n, 3, 2])[-10::-1],
        tf.stack([n, 3, 2])[None, ..., :2],
    ),
    "Slice": lambda n: tf.slice(tf.stack([n, 3, 2]), [1], [-1]),
    "Split": lambda n: tf.split(tf.stack([n, 3, 2, 1]), 2),
    "SplitV": lambda n: (
        tf.split(tf.stack([n, 3, 2, 1]), [1, 3]),
        tf.split(tf.stack([n, 3, 2, 1]), [-1, 4]),
        tf.split(tf.stack([n, 3, 2, 1]), [2, -1, 1]),
    ),
    "Prod": lambda n: (
        tf.reduce_prod(tf.stack([n, 3, 2])),
        tf.reduce_prod(tf.stack([[n, 3], [2, n]]), 0, True),
        tf.reduce_prod(tf.shape(n)),
    ),
    "Sum": lambda n: (
        tf.reduce_sum(tf.stack([n, n])),
        tf.reduce_sum(tf.stack([n, 3])),
        tf.reduce_sum(tf.shape(n)),
    ),
    "Max": lambda n: (
        tf.reduce_max(tf.stack([n, 1])),
        tf.reduce_max(tf.stack([n, n])),
        tf.reduce_max(tf.stack([[n, 2 * n], [n, n]]), [0, 1]),
    ),
    "Min": lambda n: (
        tf.reduce_min(tf.stack([n, 1, 2 * n])),
        tf.reduce_min(tf.stack([n, n])),
    ),
    "All": lambda n: (
        tf.reduce_all(tf.stack([n > 0, n >= 1])),
        tf.reduce_all(tf.stack([n > 0, n > 4])),
        tf.reduce_all(tf.shape(n) > 0),
    ),
    "Any": lambda n: (
        tf.reduce_any(tf.stack([n > 0, n > 4])),
        tf.reduce_any(tf.stack([n > 0, n >= 0])),
    ),
    "Reshape": lambda n: tf.reshape(tf.stack([n, 3, 2, n]), [2, -1]),
    "ExpandDims": lambda n: tf.expand_dims(tf.stack([n, 3]), -1),
    "Squeeze": lambda n: (
        tf.squeeze(tf.stack([[n, 3]])),
        tf.squeeze(tf.stack([[n, 3]]), [0]),
    ),
    "Transpose": lambda n: tf.transpose(tf.stack([[n, 3], [2, n]])),
    "GatherV2": lambda n: (
        tf.gather(tf.stack([n, 3, 2]), [2, 0]),
        tf.gather(tf.stack([[n, 3], [2, 1]]), 1, axis=1),
    ),
    "Range": lambda n: (tf.range(n), tf.range(2 + 0 * n), tf.range(1, 7, 2)),
    "Fill": lambda n: (tf.fill([3], n), tf.fill([2, 2], 4 + 0 * n)),
    "Tile": lambda n: tf.tile(tf.stack([n, 3]), [2]),
    "ScatterNd": lambda n: (
        tf.scatter_nd([[2], [0], [2]], [n, 3, n], [4]),
        tf.scatter_nd(
            [[[0, 1], [1, 0]], [[0, 0], [1, 2]]], [[n, 3], [2, n]], [2, 3]
        ),
    ),
    "InvertPermutation": lambda n: tf.math.invert_permutation(
        tf.stack([2 + 0 * n, 0, 1])
    ),
    "ListDiff": lambda n: (
        raw_op("ListDiff")(tf.range(4) + 0 * n, tf.constant([1, 2]) + 0 * n),
        raw_op("ListDiff")(tf.range(6), tf.stack([n, 2])),
    ),
    "DynamicStitch": lambda n: tf.dynamic_stitch(
        [[0, 2], [1]], [tf.stack([n, 3]), [5 * n]]
    ),
    "ConcatOffset": lambda n: tf.raw_ops.ConcatOffset(
        concat_dim=0, shape=[tf.stack([n, 3]), tf.stack([4, 3])]
    ),
    "BroadcastArgs": lambda n: (
        tf.broadcast_dynamic_shape(tf.stack([n, 1]), tf.constant([4])),
        tf.broadcast_dynamic_shape(tf.stack([n, 4]), tf.constant([1, 4])),
    ),
    "BroadcastGradientArgs": lambda n: [
        raw_op("BroadcastGradientArgs")(tf.stack(one), tf.stack(other))
        for one, other in (
            ([n, 1], [4]),
            ([n, 4], [1, 4]),
            ([n, 1], [n, 1]),
            ([4, 1], [1, 1]),
        )
    ],
}
_CASES = {**_NUMBERS, **_SHAPES}


_LARGE, _HALF = 2**31 - 1, 2**30
_WRAPPED = {
    "sum": lambda n: tf.constant(_LARGE) + 1 > 0,
    "unsigned": lambda n: tf.constant(1, tf.uint8) - 2 > 100,
    "reduced": lambda n: tf.reduce_prod(tf.constant([65536, 65536])) > 0,
    "cast": lambda n: tf.cast(n, tf.int8) >= 0,
    # Multiples that wrap around before something else is done.
    "widened": lambda n: tf.cast(n * _HALF, tf.int64) >= 0,
    "absolute": lambda n: abs(n * _HALF) >= 0,
    "quotient": lambda n: (n * _HALF) // _HALF >= 0,
    "remainder": lambda n: (n * (_HALF + _HALF // 2)) % 3 <= 0,
    "larger": lambda n: tf.maximum(n * _HALF, 0) == n * _HALF,
    "largest": lambda n: tf.reduce_max([n * _HALF, 0]) == n * _HALF,
}


@pytest.mark.parametrize("name", _WRAPPED)
def test_integers_that_wrap_around_choose_the_branch_of_one_device(name):
    def function(x):
        is_positive = _WRAPPED[name](tf.shape(x)[0])
        return tf.cond(is_positive, lambda: x + 1, lambda: x - 1)

    check_on_towers(function, _N, towers=((1, 1), (2, 0), (100, 100)))


def _laid_out(function):
    """What is known of the results of a function of examples."""
    return results_of(laid_out(function, _N))


@pytest.mark.parametrize("multiple", [lambda n: 4 * n, tf.square])
def test_a_multiple_of_examples_may_wrap_around_when_compared(multiple):
    (value,) = _laid_out(lambda x: multiple(tf.shape(x)[0]) >= 0)
    assert value.number is UNKNOWN


_REFUSED = {
    "GatherV2": lambda last: tf.gather([4, 5], [last]),
    "ScatterNd": lambda last: tf.scatter_nd([[last]], [1], [2]),
    "DynamicStitch": lambda last: tf.dynamic_stitch([[1], [last]], [[4], [5]]),
    "InvertPermutation": lambda last: tf.math.invert_permutation([last, 0]),
    "Slice": lambda last: tf.slice([4, 5], [last], [-last]),
    "SplitV": lambda last: tf.split([4, 5], [last - 1, 4], num=2)[1],
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_the_operation_refuses_is_left_to_it(name):
    def function(x):
        # Not known while the step is traced.
        return _REFUSED[name](tf.shape(x)[0] * 0 - 1)

    (value,) = _laid_out(function)
    assert name in {o.type for o in trace(function, _N).get_operations()}
    assert value.known is None
    with pytest.raises(OneDeviceFails):
        check_on_towers(function, _N)


_LARGE_ARRAYS = {
    "Range": lambda size: tf.range(size),
    "Fill": lambda size: tf.fill([size], 0),
    "Tile": lambda size: tf.tile([0], [size]),
    "ScatterNd": lambda size: tf.scatter_nd(
        tf.constant([[0]], tf.int64), [1], [size]
    ),
}


@pytest.mark.parametrize("name", _LARGE_ARRAYS)
def test_a_large_array_is_not_made_while_a_step_is_laid_out(name):
    def function(x):
        return _LARGE_ARRAYS[name](tf.constant(2**46, tf.int64))

    (value,) = _laid_out(function)
    assert value.known is None


def test_every_fold_has_a_case():
    folded = {type_ for type_, facts in OPERATIONS.items() if facts.fold}
    assert folded - set(_CASES) == set()


def _folded(name):
    return lambda x: tf.nest.flatten(_CASES[name](tf.shape(x)[0]))


def line_of(name):
    """What is known of an operation's results; a dash: nothing."""
    found = [value.known for value in _laid_out(_folded(name))]
    words = ["-" if known is None else str(known.tolist()) for known in found]
    return f"{name}: {', '.join(words)}"


_LISTED = Section("folding", _CASES, line_of)


@pytest.mark.parametrize("name", _CASES)
def test_fold(name):
    function = _folded(name)
    assert line_of(name) == _LISTED.listed[[*_CASES].index(name)]
    check_on_towers(function, _N, towers=((7, 8), (2, 3)))
    # An empty batch cannot be a divisor.
    with contextlib.suppress(OneDeviceFails):
        check_on_towers(function, _N, towers=((0, 0),))
    types = {o.type for o in trace(function, _N).get_operations()}
    assert name in types | {"Select"}
