"""From which dimension of which input an operation's output has a dimension.

One rule for each type of operation that moves, joins or makes dimensions; all
others keep their places.
"""

from __future__ import annotations

import fractions
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.fit.step import products, slices

# In the shape of what is reshaped.
_WHAT_IS_LEFT = -1


def source(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """Return where a dimension of an operation's output comes from.

    Args:
        walk: explains dimensions; a ``Dimensions``.
        tensor: the output.
        axis: its dimension.

    Returns:
        A ``From``, or a ``Dimension``.
    """
    rule = _RULES.get(tensor.op.type, _same_place)
    return rule(walk, tensor, axis)


def is_assumed(tensor: tf.Tensor, axis: int) -> bool:
    """Whether ``source`` only says what is likely of such an operation."""
    kind = tensor.op.type
    return kind in ASSUMED or (kind == "TensorListStack" and axis == 1)


def _reshape(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    before, shape = tensor.op.inputs
    into, out = before.shape, tensor.shape
    if not into.rank or not out.rank:
        return _listed(walk, shape, axis)
    if axis == 0:
        # Products of static dimensions are not folded by TensorFlow.
        old = _row_size(into, lambda place: walk.of(before, place))
        new = _row_size(out, lambda place: walk.of_element(shape, place))
        if old and new:
            return slices.From(before, 0, fractions.Fraction(old, new))
    found = _listed(walk, shape, axis)
    if found != _WHAT_IS_LEFT:
        return found
    others = [walk.of_element(shape, a) for a in range(out.rank) if a != axis]
    return _quotient([walk.of(before, a) for a in range(into.rank)], others)


def _row_size(
    shape: tf.TensorShape, explain: Callable[[int], Any]
) -> int | None:
    """The number of elements of a row; None if it is not known."""
    count = 1
    for place in range(1, shape.rank):
        size = shape[place]
        size = explain(place) if size is None else size
        if not isinstance(size, int) or size < 0:
            return None
        count *= size
    return count


def _quotient(dividends: list[Any], divisors: list[Any]) -> Any:
    """A product of dimensions by another; None where it has rows."""
    dividends = list(dividends)
    for size in [size for size in divisors if isinstance(size, tuple)]:
        if size not in dividends:
            return None
        dividends.remove(size)
    divisors = [size for size in divisors if not isinstance(size, tuple)]
    if not all(isinstance(size, int) for size in (*dividends, *divisors)):
        return None
    return (
        math.prod(dividends) // math.prod(divisors) if all(divisors) else None
    )


def _listed(walk: Any, shape: tf.Tensor, axis: int) -> Any:
    """A dimension that is an element of a shape tensor."""
    if shape.shape.rank != 1:
        return None
    return walk.of_element(shape, axis)


def _transpose(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    order = slices.constant(tensor.op.inputs[1])
    return (
        None if order is None else slices.From(tensor.op.inputs[0], order[axis])
    )


def _expand(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    place = slices.constant(tensor.op.inputs[1])
    if place is None:
        return None
    place = int(np.reshape(place, ())) % tensor.shape.rank
    return slices.From(tensor.op.inputs[0], axis - (axis > place))


def _squeeze(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    before = tensor.op.inputs[0]
    dropped = {d % before.shape.rank for d in _list(tensor, "squeeze_dims")}
    if not dropped:
        return None
    return slices.From(before, _without(dropped, before)[axis])


def _list(tensor: tf.Tensor, name: str) -> list[int]:
    return list(tensor.op.get_attr(name))


def _without(dropped: set[int], tensor: tf.Tensor) -> list[int]:
    return [d for d in range(tensor.shape.rank) if d not in dropped]


def _reduced(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    before, places = tensor.op.inputs
    if "keep_dims" in tensor.op.node_def.attr and tensor.op.get_attr(
        "keep_dims"
    ):
        return slices.From(before, axis)
    places = slices.constant(places)
    if places is None or before.shape.rank is None:
        return None
    dropped = {int(p) % before.shape.rank for p in np.ravel(places)}
    return slices.From(before, _without(dropped, before)[axis])


def _pack(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    place = tensor.op.get_attr("axis") % tensor.shape.rank
    if axis == place:
        return len(tensor.op.inputs)
    return slices.From(tensor.op.inputs[0], axis - (axis > place))


def _unpack(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    before = tensor.op.inputs[0]
    place = tensor.op.get_attr("axis") % before.shape.rank
    return slices.From(before, axis + (axis >= place))


def _same_input(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    return slices.From(tensor.op.inputs[tensor.value_index], axis)


def _first_input(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    return slices.From(tensor.op.inputs[0], axis)


def _one_hot(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    indices, depth, *_ = tensor.op.inputs
    place = tensor.op.get_attr("axis") % tensor.shape.rank
    if axis == place:
        return walk.of_scalar(depth)
    return slices.From(indices, axis - (axis > place))


def _range(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    start, limit, delta = tensor.op.inputs
    if slices.constant(start) != 0 or slices.constant(delta) != 1:
        return None
    return walk.of_scalar(limit)


def _stacked(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """What a loop wrote into a ``TensorArray``, one element for each round."""
    if axis == 0:
        return _rounds(walk, tensor.op.inputs[0])
    if axis == 1 and not isinstance(
        _rounds(walk, tensor.op.inputs[0]), (tuple, type(None))
    ):
        return (1,)
    return None


def _rounds(walk: Any, handle: Any) -> Any:
    """The number of elements of a ``TensorArray``."""
    while hasattr(handle, "op"):
        op = handle.op
        if op.type in ("While", "StatelessWhile"):
            handle = op.inputs[handle.value_index]
        elif op.type in ("TensorListSetItem", "Identity"):
            handle = op.inputs[0]
        elif op.type == "TensorListReserve":
            return walk.of_scalar(op.inputs[1])
        elif op.type == "TensorListFromTensor":
            return walk.of(op.inputs[0], 0)
        else:
            return None
    return None


def _unknown(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    return None


def _one_row_each(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    return (1,) if axis == 0 else None


def _same_place(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    rank, size = tensor.shape.rank, tensor.shape[axis]
    inputs = list(tensor.op.inputs)
    alike = [p for p in inputs if p.shape.rank == rank]
    found = slices.first_of(walk, alike, axis, size)
    if found is None and axis == 0:
        alike = [p for p in inputs if p.shape.rank]
        found = slices.first_of(walk, alike, 0, size)
    return found


def _listed_by(index: int) -> Callable[[Any, tf.Tensor, int], Any]:
    """The rule of operations that take the output's shape as an input."""

    def rule(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
        return _listed(walk, tensor.op.inputs[index], axis)

    return rule


# Operations of which it is not known, but likely, that they keep the examples.
ASSUMED = frozenset(
    (
        *("If", "StatelessIf", "Case", "StatelessCase"),
        *("PartitionedCall", "StatefulPartitionedCall"),
        *("RaggedTensorToTensor", "SparseTensorDenseMatMul"),
    )
)

_RULES: dict[str, Callable[[Any, tf.Tensor, int], Any]] = {
    "StridedSlice": slices.strided_slice,
    "Slice": slices.cut,
    "Split": slices.split,
    "SplitV": slices.split,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "ExpandDims": _expand,
    "Squeeze": _squeeze,
    "Pack": _pack,
    "Unpack": _unpack,
    "ConcatV2": slices.concatenated,
    "Tile": slices.tiled,
    "Einsum": products.einsum,
    "OneHot": _one_hot,
    "Range": _range,
    "PlaceholderWithDefault": _first_input,
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), slices.surrounded),
    "GatherNd": slices.gather_nd,
    "TensorListStack": _stacked,
    **dict.fromkeys(
        ("MatMul", "BatchMatMul", "BatchMatMulV2"), products.matmul
    ),
    **dict.fromkeys(("Gather", "GatherV2", "ResourceGather"), slices.gather),
    **dict.fromkeys(
        ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin"),
        _reduced,
    ),
    # The value before a loop; what is given a gradient of its own.
    **dict.fromkeys(("While", "StatelessWhile", "IdentityN"), _same_input),
    **dict.fromkeys(ASSUMED, _one_row_each),
    **dict.fromkeys(
        (
            *("Where", "Unique", "UniqueV2", "UniqueWithCounts", "ListDiff"),
            *("UniqueWithCountsV2", "DynamicPartition", "DynamicStitch"),
            *("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin"),
            *("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"),
            *("RaggedGather", "RaggedRange", "StringSplitV2", "StringSplit"),
            *("NonMaxSuppressionV3", "NonMaxSuppressionV4"),
            *("NonMaxSuppressionV5", "PyFunc", "EagerPyFunc"),
        ),
        _unknown,
    ),
    **dict.fromkeys(("Fill", "StatelessMultinomial"), _listed_by(0)),
    "BroadcastTo": _listed_by(1),
    **dict.fromkeys(
        (
            *("StatelessRandomUniformV2", "StatelessRandomNormalV2"),
            *("StatelessTruncatedNormalV2", "StatelessRandomUniformIntV2"),
            *("StatelessRandomUniformFullIntV2", "StatelessRandomGammaV3"),
            *("StatelessRandomBinomial", "StatelessRandomPoisson"),
        ),
        _listed_by(0),
    ),
}
# Its first input are values, of shape [rows, classes].
_RULES["StatelessMultinomial"] = _same_place
