"""From which dimension of which input an operation's output has a dimension.

One rule for each type of operation that moves, joins or makes dimensions; all
others keep their places.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass
class From:
    """Says that a dimension is that of an input, times a factor.

    Attributes:
        tensor: the input.
        axis: its dimension.
        scale: rows of the output for each row of the input.
    """

    tensor: Any
    axis: int
    scale: fractions.Fraction = fractions.Fraction(1)


def source(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """Return where a dimension of an operation's output comes from.

    Args:
        walk: explains dimensions; a ``Dimensions``.
        tensor: the output.
        axis: its dimension, which is not static.

    Returns:
        A ``From``, or a ``Dimension``.
    """
    rule = _RULES.get(tensor.op.type, _same_place)
    return rule(walk, tensor, axis)


def constant(tensor: Any) -> Any:
    """Return a static value as an array or a number; None if there is none."""
    value = tf.get_static_value(tensor)
    return value if value is None or np.ndim(value) else value.item()


def start_of_slice(tensor: tf.Tensor) -> tuple[int, int] | None:
    """Return the first index and the stride of a slice of a vector."""
    entries = _entries(tensor)
    if entries is None or len(entries) != 1:
        return None
    begin, _, stride, _ = entries[0]
    return (begin or 0, stride) if stride > 0 else None


def _entries(tensor: tf.Tensor) -> list[tuple] | None:
    """The slices (begin, end, stride, drops) of a StridedSlice, by input axis.

    ``begin`` and ``end`` are None where the slice is open. None if there is a
    new axis, or a value is not static.
    """
    op = tensor.op
    strides = constant(op.inputs[3])
    rank = op.inputs[0].shape.rank
    if strides is None or rank is None or op.get_attr("new_axis_mask"):
        return None
    begins = elements(op.inputs[1])
    ends = elements(op.inputs[2])
    entries: list[tuple] = []
    for index, stride in enumerate(strides):
        bit = 1 << index
        if op.get_attr("ellipsis_mask") & bit:
            missing = rank - (len(strides) - 1)
            entries += [(None, None, 1, False)] * missing
            continue
        drops = bool(op.get_attr("shrink_axis_mask") & bit)
        begin = None if op.get_attr("begin_mask") & bit else begins[index]
        end = None if op.get_attr("end_mask") & bit else ends[index]
        entries.append((begin, end, int(stride), drops))
    return entries


def elements(vector: tf.Tensor) -> list[Any]:
    """Return the static elements of a vector; NaN for others."""
    value = constant(vector)
    if value is not None:
        return [int(item) for item in value]
    if vector.op.type == "Pack":
        items = [constant(item) for item in vector.op.inputs]
        return [math.nan if item is None else int(item) for item in items]
    return [math.nan] * vector.shape[0]


def _strided_slice(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    entries = _entries(tensor)
    whole = tensor.op.inputs[0]
    if entries is None:
        return None
    entries += [(None, None, 1, False)] * (whole.shape.rank - len(entries))
    kept = [place for place, entry in enumerate(entries) if not entry[3]]
    begin, end, stride, _ = entries[kept[axis]]
    if begin in (None, 0) and end is None and stride == 1:
        return From(whole, kept[axis])
    found = walk.of(whole, kept[axis])
    return found if isinstance(found, str) else None


def _slice(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    whole, begin, size = tensor.op.inputs
    if elements(begin)[axis] == 0 and elements(size)[axis] == -1:
        return From(whole, axis)
    found = walk.of(whole, axis)
    return found if isinstance(found, str) else None


def _split(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    first = tensor.op.type == "Split"
    place = constant(tensor.op.inputs[0 if first else 2])
    whole = tensor.op.inputs[1 if first else 0]
    if place is None or place % whole.shape.rank == axis:
        return None
    return From(whole, axis)


def _reshape(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    before, shape = tensor.op.inputs
    into, out = before.shape, tensor.shape
    if into.rank and out.rank and axis == 0:
        old, new = into[1:], out[1:]
        if old.is_fully_defined() and new.is_fully_defined():
            sizes = old.num_elements(), new.num_elements()
            if all(sizes):
                return From(before, 0, fractions.Fraction(*sizes))
    return _listed(walk, shape, axis)


def _listed(walk: Any, shape: tf.Tensor, axis: int) -> Any:
    """A dimension that is an element of a shape tensor."""
    if shape.shape.rank != 1:
        return None
    return walk.of_element(shape, axis)


def _transpose(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    order = constant(tensor.op.inputs[1])
    return None if order is None else From(tensor.op.inputs[0], order[axis])


def _expand(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    place = constant(tensor.op.inputs[1])
    if place is None:
        return None
    place = int(np.reshape(place, ())) % tensor.shape.rank
    return From(tensor.op.inputs[0], axis - (axis > place))


def _squeeze(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    before = tensor.op.inputs[0]
    dropped = {d % before.shape.rank for d in _list(tensor, "squeeze_dims")}
    if not dropped:
        return None
    return From(before, _without(dropped, before)[axis])


def _list(tensor: tf.Tensor, name: str) -> list[int]:
    return list(tensor.op.get_attr(name))


def _without(dropped: set[int], tensor: tf.Tensor) -> list[int]:
    return [d for d in range(tensor.shape.rank) if d not in dropped]


def _reduced(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    before, places = tensor.op.inputs
    if "keep_dims" in tensor.op.node_def.attr and tensor.op.get_attr(
        "keep_dims"
    ):
        return From(before, axis)
    places = constant(places)
    if places is None or before.shape.rank is None:
        return None
    dropped = {int(p) % before.shape.rank for p in np.ravel(places)}
    return From(before, _without(dropped, before)[axis])


def _pack(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    place = tensor.op.get_attr("axis") % tensor.shape.rank
    return From(tensor.op.inputs[0], axis - (axis > place))


def _unpack(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    before = tensor.op.inputs[0]
    place = tensor.op.get_attr("axis") % before.shape.rank
    return From(before, axis + (axis >= place))


def _concatenated(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    *parts, place = tensor.op.inputs
    place = constant(place)
    if place is None:
        return None
    if place % tensor.shape.rank != axis:
        return _first(parts, axis)
    found = [walk.of(part, axis) for part in parts]
    if all(isinstance(part, tuple) for part in found):
        return sum(found, ())
    same = all(isinstance(part, (int, str)) for part in found)
    return "same" if same else None


def _first(parts: Any, axis: int) -> Any:
    for part in parts:
        if part.shape.rank is not None and part.shape[axis] is None:
            return From(part, axis)
    return None


def _gather(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    values, indices, *rest = tensor.op.inputs
    place = constant(rest[0]) if rest else 0
    depth = indices.shape.rank
    if place is None or depth is None:
        return None
    skipped = 0
    if "batch_dims" in tensor.op.node_def.attr:
        skipped = tensor.op.get_attr("batch_dims")
    if values.dtype != tf.resource:
        place %= values.shape.rank
    if axis < place:
        return From(values, axis)
    if axis < place + depth - skipped:
        return From(indices, axis - place + skipped)
    if values.dtype == tf.resource:
        return None
    return From(values, axis - depth + skipped + 1)


def _gather_nd(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    values, indices = tensor.op.inputs
    depth = indices.shape[-1]
    if axis < indices.shape.rank - 1:
        return From(indices, axis)
    if depth is None:
        return None
    return From(values, axis - (indices.shape.rank - 1) + depth)


def _tiled(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    before, times = tensor.op.inputs
    count = walk.of_element(times, axis)
    if count == 1:
        return From(before, axis)
    if before.shape[axis] == 1:
        return count
    inside = walk.of(before, axis)
    if isinstance(inside, tuple) and isinstance(count, int):
        return inside * count
    same = isinstance(inside, (int, str)) and isinstance(count, (int, str))
    return "same" if same else None


def _matmul(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    one, two = tensor.op.inputs[:2]
    rank = tensor.shape.rank
    batched = tensor.op.type != "MatMul"
    flipped = [
        tensor.op.get_attr(name)
        for name in (("adj_x", "adj_y") if batched else _PLAIN)
    ]
    if axis < rank - 2:
        return _first([p for p in (one, two) if p.shape.rank == rank], axis)
    if axis == rank - 2:
        return From(one, one.shape.rank - (1 if flipped[0] else 2))
    return From(two, two.shape.rank - (2 if flipped[1] else 1))


_PLAIN = ("transpose_a", "transpose_b")


def _einsum(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    equation = tensor.op.get_attr("equation").decode().replace(" ", "")
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if "..." in equation:
        rests = [
            part.shape.rank - len(term.replace("...", ""))
            for part, term in zip(tensor.op.inputs, terms, strict=True)
        ]
        names = "0123456789"[: max(rests)]
        terms = [
            term.replace("...", names[len(names) - rest :])
            for term, rest in zip(terms, rests, strict=True)
        ]
        output = output.replace("...", names)
    label = output[axis]
    for part, term in zip(tensor.op.inputs, terms, strict=True):
        if label in term and part.shape[term.index(label)] is None:
            return From(part, term.index(label))
    return None


def _surrounded(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    before, widths = tensor.op.inputs[:2]
    around = constant(widths)
    if around is not None and not np.any(around[axis]):
        return From(before, axis)
    found = walk.of(before, axis)
    return found if isinstance(found, str) else None


def _first_input(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    return From(tensor.op.inputs[0], axis)


def _one_hot(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    place = tensor.op.get_attr("axis") % tensor.shape.rank
    return From(tensor.op.inputs[0], axis - (axis > place))


def _range(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    start, limit, delta = tensor.op.inputs
    if constant(start) != 0 or constant(delta) != 1:
        return None
    return walk.of_scalar(limit)


def _loop(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """The value before a loop."""
    return From(tensor.op.inputs[tensor.value_index], axis)


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
    rank = tensor.shape.rank
    inputs = list(tensor.op.inputs)
    found = _first([p for p in inputs if p.shape.rank == rank], axis)
    if found is None and axis == 0:
        found = _first([p for p in inputs if p.shape.rank], 0)
    return found


def _listed_by(index: int) -> Callable[[Any, tf.Tensor, int], Any]:
    """The rule of operations that take the output's shape as an input."""

    def rule(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
        return _listed(walk, tensor.op.inputs[index], axis)

    return rule


_RULES: dict[str, Callable[[Any, tf.Tensor, int], Any]] = {
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "Split": _split,
    "SplitV": _split,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "ExpandDims": _expand,
    "Squeeze": _squeeze,
    "Pack": _pack,
    "Unpack": _unpack,
    "ConcatV2": _concatenated,
    "Tile": _tiled,
    "Einsum": _einsum,
    "OneHot": _one_hot,
    "Range": _range,
    "PlaceholderWithDefault": _first_input,
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _surrounded),
    "GatherNd": _gather_nd,
    "TensorListStack": _stacked,
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2"), _matmul),
    **dict.fromkeys(("Gather", "GatherV2", "ResourceGather"), _gather),
    **dict.fromkeys(
        ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin"),
        _reduced,
    ),
    **dict.fromkeys(("While", "StatelessWhile"), _loop),
    **dict.fromkeys(
        (
            *("If", "StatelessIf", "Case", "StatelessCase"),
            *("PartitionedCall", "StatefulPartitionedCall"),
            *("RaggedTensorToTensor", "SparseTensorDenseMatMul"),
        ),
        _one_row_each,
    ),
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
