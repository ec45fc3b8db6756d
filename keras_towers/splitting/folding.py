"""Computing what is known before a step runs: sizes, axes and other numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.sizes import UNKNOWN, Size, broadcast, compared
from keras_towers.splitting.slices import index_of
from keras_towers.splitting.values import Value, of_known, same

# Of more entries it is not worth it.
LARGEST = 512

Fold = Callable[..., Any]
_FOLDS: dict[str, Fold] = {}


def folded(node: Node, values: Sequence[Value]) -> list[Value] | None:
    """Return the outputs of an operation on known inputs, or None.

    Computed are integers and truths, and what is made of integers.
    """
    fold = _FOLDS.get(node.type)
    if fold is None or any(v.known is None for v in values):
        return None
    if not all(
        node.dtype(k).is_integer or node.dtype(k).is_bool
        for k in range(node.num_inputs)
    ):
        return None
    try:
        result = fold(node, *(value.known for value in values))
    except (ValueError, LookupError, TypeError):
        return None
    results = result if isinstance(result, list) else [result]
    if any(np.size(entries) > LARGEST for entries in results):
        return None
    if all(v.is_same and not v.grows for v in values):
        # What is not known of it is not known of any tower, and the same.
        return [_same_known(entries) for entries in results]
    return [of_known(entries) for entries in results]


def _same_known(entries: Any) -> Value:
    known = np.asarray(entries, dtype=object)
    if UNKNOWN in known.flat:
        return same(known=known, shape=known.shape)
    return of_known(known)


def _fold(*types: str) -> Callable[[Fold], Fold]:
    def add(fold: Fold) -> Fold:
        _FOLDS.update(dict.fromkeys(types, fold))
        return fold

    return add


def _elementwise(function: Any) -> Fold:
    vectorized = np.frompyfunc(function, function.__code__.co_argcount, 1)
    return lambda node, *arrays: vectorized(*arrays)


def _comparing(compare: Callable[[Any, Any], bool]) -> Fold:
    return _elementwise(lambda a, b: compared(compare, a, b))


def _extreme(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def extreme(a: Any, b: Any) -> Any:
        is_first = compared(compare, a, b)
        return UNKNOWN if is_first is UNKNOWN else a if is_first else b

    return extreme


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, bool | np.bool_):
        return a if condition else b
    return a if a == b else UNKNOWN


def _both(a: Any, b: Any) -> Any:
    if UNKNOWN in (a, b):
        return UNKNOWN if a is not False and b is not False else False
    return bool(a and b)


def _one_of(a: Any, b: Any) -> Any:
    if UNKNOWN in (a, b):
        return True if a is True or b is True else UNKNOWN
    return bool(a or b)


def _divided(a: Any, b: Any) -> Any:
    return UNKNOWN if not isinstance(b, Size) and not b else a // b


def _remainder(a: Any, b: Any) -> Any:
    return UNKNOWN if not isinstance(b, Size) and not b else a % b


for _type, _function in {
    "Add": lambda a, b: a + b,
    "AddV2": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": _divided,
    "FloorMod": _remainder,
    "Maximum": _extreme(operator.ge),
    "Minimum": _extreme(operator.le),
    "Neg": lambda a: -a,
    "Abs": lambda a: abs(a),
    "Square": lambda a: a * a,
    "LogicalAnd": _both,
    "LogicalOr": _one_of,
    "LogicalNot": lambda a: UNKNOWN if a is UNKNOWN else not a,
    "Select": _chosen,
    "SelectV2": _chosen,
    "ZerosLike": lambda a: 0,
    "OnesLike": lambda a: 1,
}.items():
    _FOLDS[_type] = _elementwise(_function)
for _type, _compare in {
    "Less": operator.lt,
    "LessEqual": operator.le,
    "Greater": operator.gt,
    "GreaterEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
}.items():
    _FOLDS[_type] = _comparing(_compare)


@_fold("Cast", "Identity", "Snapshot", "StopGradient")
def _same(node: Node, array: Any) -> Any:
    dtype = node.output_dtype(0)
    if node.type == "Cast" and dtype.is_integer:
        fits = [
            isinstance(entry, Size)
            or entry is UNKNOWN
            or dtype.min <= entry <= dtype.max
            for entry in array.flat
        ]
        if not all(fits):
            raise ValueError("wraps around")
    if node.type == "Cast" and dtype.is_bool:
        return np.frompyfunc(lambda a: compared(operator.ne, a, 0), 1, 1)(array)
    return array


@_fold("Pack")
def _pack(node: Node, *arrays: Any) -> Any:
    return np.stack(arrays, node.attr("axis"))


@_fold("Unpack")
def _unpack(node: Node, array: Any) -> Any:
    axis = node.attr("axis")
    return [np.take(array, k, axis) for k in range(array.shape[axis])]


@_fold("ConcatV2")
def _concatenated(node: Node, *arrays: Any) -> Any:
    *parts, axis = arrays
    return np.concatenate(parts, int(axis))


@_fold("StridedSlice")
def _strided(node: Node, array: Any, *ends: Any) -> Any:
    return array[index_of(node, *ends)]


@_fold("Slice")
def _slice(node: Node, array: Any, begin: Any, size: Any) -> Any:
    spans = [
        slice(int(b), None if s == -1 else int(b + s))
        for b, s in zip(begin, size, strict=True)
    ]
    return array[tuple(spans)]


@_fold("Split")
def _split(node: Node, axis: Any, array: Any) -> Any:
    return np.split(array, node.num_outputs, int(axis))


@_fold("SplitV")
def _split_at(node: Node, array: Any, sizes: Any, axis: Any) -> Any:
    return np.split(array, np.cumsum([int(s) for s in sizes])[:-1], int(axis))


@_fold("Prod", "Sum", "Max", "Min", "All", "Any")
def _reduced(node: Node, array: Any, axes: Any) -> Any:
    combine = {
        "Prod": lambda a, b: a * b,
        "Sum": lambda a, b: a + b,
        "Max": _extreme(operator.ge),
        "Min": _extreme(operator.le),
        "All": _both,
        "Any": _one_of,
    }[node.type]
    if not array.size:
        empty = {"Prod": 1, "Sum": 0, "All": True, "Any": False}
        shape: Any = node.static_shape() or ()
        return np.full(shape, empty[node.type], object)
    over = tuple(int(a) for a in np.ravel(axes))
    keep = node.attr("keep_dims")
    reduce = np.frompyfunc(combine, 2, 1).reduce
    for axis in sorted((a % max(array.ndim, 1) for a in over), reverse=True):
        array = reduce(array, axis=axis, keepdims=keep)
    return array


@_fold("Reshape")
def _reshape(node: Node, array: Any, shape: Any) -> Any:
    return array.reshape([int(s) for s in shape])


@_fold("ExpandDims")
def _expanded(node: Node, array: Any, axis: Any) -> Any:
    return np.expand_dims(array, int(np.ravel(axis)[0]))


@_fold("Squeeze")
def _squeezed(node: Node, array: Any) -> Any:
    return np.squeeze(array, tuple(node.attr("squeeze_dims")) or None)


@_fold("Transpose")
def _transposed(node: Node, array: Any, order: Any) -> Any:
    return np.transpose(array, [int(o) for o in order])


@_fold("GatherV2")
def _gathered(node: Node, array: Any, places: Any, axis: Any) -> Any:
    if node.attr("batch_dims"):
        raise ValueError("not needed of sizes")
    return np.take(array, places.astype(int), int(axis))


@_fold("Range")
def _range(node: Node, start: Any, end: Any, step: Any) -> Any:
    return np.arange(int(start), int(end), int(step)).astype(object)


@_fold("Fill")
def _filled(node: Node, shape: Any, entry: Any) -> Any:
    return np.full([int(s) for s in shape], entry[()], object)


@_fold("Tile")
def _tiled(node: Node, array: Any, times: Any) -> Any:
    return np.tile(array, [int(t) for t in times])


@_fold("ScatterNd")
def _scattered(node: Node, places: Any, entries: Any, shape: Any) -> Any:
    result = np.zeros([int(s) for s in shape], object)
    for place, entry in zip(places, entries, strict=True):
        where = tuple(int(p) for p in place)
        result[where] = result[where] + entry
    return result


@_fold("InvertPermutation")
def _inverted(node: Node, order: Any) -> Any:
    return np.argsort([int(o) for o in order]).astype(object)


@_fold("ListDiff")
def _without(node: Node, array: Any, left_out: Any) -> Any:
    kept = [k for k, entry in enumerate(array) if entry not in list(left_out)]
    return [array[kept], np.array(kept, object)]


@_fold("DynamicStitch")
def _stitched(node: Node, *arrays: Any) -> Any:
    half = len(arrays) // 2
    places = [np.ravel(a) for a in arrays[:half]]
    entries = [np.ravel(a) for a in arrays[half:]]
    result = np.zeros(1 + max(int(p) for ps in places for p in ps), object)
    for indices, given in zip(places, entries, strict=True):
        for index, entry in zip(indices, given, strict=True):
            result[int(index)] = entry
    return result


@_fold("ConcatOffset")
def _offsets(node: Node, axis: Any, *shapes: Any) -> Any:
    results, before = [], 0
    for shape in shapes:
        offset = np.zeros(len(shape), object)
        offset[int(axis)] = before
        before = before + shape[int(axis)]
        results.append(offset)
    return results


@_fold("BroadcastArgs")
def _broadcast(node: Node, a: Any, b: Any) -> Any:
    return np.array(broadcast(a, b), object)


@_fold("BroadcastGradientArgs")
def _broadcast_over(node: Node, a: Any, b: Any) -> Any:
    rank = max(len(a), len(b))
    wide = [[1] * (rank - len(s)) + list(s) for s in (a, b)]
    over: list[list[int]] = [[], []]
    if list(a) == list(b) and UNKNOWN not in wide[0]:
        return [np.array(axes, object) for axes in over]
    for axis, (d, e) in enumerate(zip(*wide, strict=True)):
        for mine, this, that, shape in ((0, d, e, a), (1, e, d, b)):
            missing = axis < rank - len(shape)
            if missing or (this == 1 and that != 1) or (d == 1 and e == 1):
                over[mine].append(axis)
    if UNKNOWN in wide[0] or UNKNOWN in wide[1]:
        raise ValueError("a size that is not known")
    return [np.array(axes, object) for axes in over]
