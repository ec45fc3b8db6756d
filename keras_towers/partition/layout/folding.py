"""Constant folding, of numbers, sizes and axes that are known before a step.

``layout_pass.py`` folds the outputs of each operation; rules read
``Value.known``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_towers.partition.ir.sizes import UNKNOWN, Size, compared
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.spans import spans, split_sizes

# Larger constants are not folded.
LARGEST = 512

Array: TypeAlias = Any
"""A NumPy array of numbers and sizes, some of them unknown, or an entry."""
Fold: TypeAlias = Callable[..., Array]


def folded(node: Node, inputs: Sequence[object]) -> list[Array] | None:
    """Return the known entries of an operation's outputs, or None.

    Integers and truth values are folded, and floats that are cast from them.
    TensorFlow computes numbers that would overflow, and reports arguments that
    it refuses. A multiple of a symbol may wrap around at run time, so only
    operations that commute with that are folded.

    Args:
        node: the operation.
        inputs: the entries of its N inputs; None: unknown.
    """
    fold = node.facts.fold
    if fold is None or any(entries is None for entries in inputs):
        return None
    if not all(
        node.dtype(k).is_integer or node.dtype(k).is_bool
        for k in range(len(inputs))
    ):
        return None
    try:
        result = fold(node, *inputs)
    except (ValueError, IndexError, ZeroDivisionError):
        return None
    results = result if isinstance(result, list) else [result]
    if any(np.size(entries) > LARGEST for entries in results):
        return None
    for k, entries in enumerate(results):
        if not node.shapes[k].is_compatible_with(np.shape(entries)):
            return None
        if not _fits(entries, node.output_dtype(k)):
            return None
    return [np.asarray(entries, dtype=object) for entries in results]


def _fits(entries: Array, dtype: tf.DType) -> bool:
    """Whether a dtype can represent entries.

    Of a multiple of a symbol only the factor is checked: it is the size of an
    array, which TensorFlow counts with at least 32 bits.
    """
    if not dtype.is_integer:
        return True
    known = [
        entry
        for entry in np.ravel(np.asarray(entries, dtype=object))
        if entry is not UNKNOWN
    ]
    if dtype.size < 4 and any(isinstance(entry, Size) for entry in known):
        return False
    numbers = [
        entry.number if isinstance(entry, Size) else entry for entry in known
    ]
    return all(dtype.min <= number <= dtype.max for number in numbers)


def constant(operation: tf.Operation) -> Array:
    """Return the entries of a small constant, or None.

    The result is an array of objects.
    """
    proto = operation.get_attr("value")
    shape = tuple(dimension.size for dimension in proto.tensor_shape.dim)
    size = math.prod(shape)
    dtype = tf.as_dtype(proto.dtype)
    if dtype in (tf.resource, tf.variant, tf.string) or size > LARGEST:
        return None
    if not (dtype.is_integer or dtype.is_bool or size == 1):
        return None
    entries = tf.make_ndarray(proto).tolist()
    return np.array(entries, dtype=object).reshape(shape)


def each(function: Callable[..., object]) -> Fold:
    """Return a fold that applies a function entry by entry."""
    return lambda node, *arrays: _each(function, *arrays)


def _each(function: Callable[..., object], *arrays: Array) -> Array:
    return np.frompyfunc(function, len(arrays), 1)(*arrays)


def exact(fold: Fold) -> Fold:
    """Return a fold of integers that cannot have wrapped around.

    Others are unknown: the function would give another result for a number
    modulo 2**32.
    """

    def fold_exact(node: Node, *arrays: Array) -> Array:
        known = [
            array
            if node.dtype(k).size == 8
            else np.asarray(_each(_if_exact, array), dtype=object)
            for k, array in enumerate(arrays)
        ]
        return fold(node, *known)

    return fold_exact


def _if_exact(entry: object) -> Array:
    return UNKNOWN if _may_overflow(entry) else entry


def exact_each(function: Callable[..., object]) -> Fold:
    return exact(each(function))


def comparing(compare: Callable[[Array, Array], bool]) -> Fold:
    def fold(node: Node, *arrays: Array) -> Array:
        is_wide = node.dtype(0).size == 8

        def compare_entries(a: Array, b: Array) -> Array:
            # The result may select a branch, so the operands must not have
            # overflowed.
            is_exact = is_wide or a == b or not _may_overflow(a, b)
            return compared(compare, a, b) if is_exact else UNKNOWN

        return _each(compare_entries, *arrays)

    return fold


def _may_overflow(*entries: Array) -> bool:
    """Whether an entry may overflow int32, as a product of a symbol may."""
    return any(
        entry.number != 1 or [power for _, power in entry.powers] != [1]
        for entry in entries
        if isinstance(entry, Size)
    )


def larger(a: Array, b: Array) -> Array:
    return _first_if(compared(operator.ge, a, b), a, b)


def lesser(a: Array, b: Array) -> Array:
    return _first_if(compared(operator.le, a, b), a, b)


def _first_if(condition: Array, a: Array, b: Array) -> Array:
    return UNKNOWN if condition is UNKNOWN else a if condition else b


def chosen(condition: Array, a: Array, b: Array) -> Array:
    if isinstance(condition, bool | np.bool_):
        return a if condition else b
    return a if a == b else UNKNOWN


def chosen_rows(node: Node, condition: Array, a: Array, b: Array) -> Array:
    # The condition has the first axes, not the last.
    axes = range(condition.ndim, a.ndim)
    return _each(chosen, np.expand_dims(condition, tuple(axes)), a, b)


def both(a: Array, b: Array) -> Array:
    if UNKNOWN in (a, b):
        return UNKNOWN if a is not False and b is not False else False
    return bool(a and b)


def one_of(a: Array, b: Array) -> Array:
    if UNKNOWN in (a, b):
        return True if a is True or b is True else UNKNOWN
    return bool(a or b)


def cast(node: Node, array: Array) -> Array:
    dtype = node.output_dtype()
    if dtype.is_bool:
        return exact_each(lambda a: compared(operator.ne, a, 0))(node, array)
    # An integer that wrapped around stays so.
    widens = not dtype.is_integer or dtype.size > node.dtype(0).size
    return exact_each(lambda a: a)(node, array) if widens else array


def sliced(node: Node, array: Array, *ends: Array) -> Array:
    index: list[Array] = []
    for span in spans(node, array.shape, *ends):
        if span.dropped:
            index.append(to_int(span.begin))
            continue
        if span.axis is None or span.is_whole:
            index.append(None if span.axis is None else slice(None))
            continue
        size = to_int(span.size)
        if not size:
            index.append(slice(0))
            continue
        begin, whole = to_int(span.begin), array.shape[span.axis]
        if node.type == "Slice" and not 0 <= begin <= whole - size:
            raise ValueError("outside of the array")
        last = begin + size * span.stride
        index.append(slice(begin, last if last >= 0 else None, span.stride))
    return array[tuple(index)]


def reduced(
    combine: Callable[[Array, Array], Array], empty: int | None = None
) -> Fold:
    """Return a fold that reduces an array by a function.

    Of no entries the result is ``empty``.
    """

    def fold(node: Node, array: Array, axes: Array) -> Array:
        if not array.size and empty is None:
            raise ValueError("the largest or least of no entries")
        if not array.size:
            return np.full(to_ints(node.shapes[0]), empty, object)
        along = {axis % max(array.ndim, 1) for axis in to_ints(np.ravel(axes))}
        combined, keep = np.frompyfunc(combine, 2, 1), node.attr("keep_dims")
        for axis in sorted(along, reverse=True):
            array = combined.reduce(array, axis=axis, keepdims=keep)
        return array

    return fold


def gathered(node: Node, array: Array, indices: Array, axis: Array) -> Array:
    if node.attr("batch_dims"):
        raise ValueError("a row of indices for each row")
    return np.take(array, _indices(indices), to_int(axis))


def _indices(array: Array) -> Array:
    """Convert indices that may be negative, as in NumPy."""
    indices = np.array(to_ints(np.ravel(array)), int).reshape(np.shape(array))
    if indices.min(initial=0) < 0:
        raise ValueError("a negative index")
    return indices


def scattered(
    node: Node, indices: Array, entries: Array, shape: Array
) -> Array:
    result = np.full(small_shape(shape), 0, object)
    places = np.moveaxis(_indices(indices), -1, 0)
    np.add.at(result, tuple(places), entries)
    return result


def list_diff(node: Node, array: Array, left_out: Array) -> Array:
    kept = []
    for k, entry in enumerate(array):
        equal = [compared(operator.eq, entry, other) for other in left_out]
        if UNKNOWN in equal and True not in equal:
            raise ValueError("an entry may be left out or not")
        if True not in equal:
            kept.append(k)
    return [array[kept], np.array(kept, object)]


def stitched(node: Node, *arrays: Array) -> Array:
    half = len(arrays) // 2
    indices = [np.ravel(_indices(array)) for array in arrays[:half]]
    size = 1 + max(places.max(initial=-1) for places in indices)
    result = np.full(small_shape([size]), 0, object)
    for places, entries in zip(indices, arrays[half:], strict=True):
        result[places] = np.ravel(entries)
    return result


def offsets(node: Node, axis: Array, *shapes: Array) -> Array:
    results, before = [], 0
    for shape in shapes:
        offset = np.zeros(len(shape), object)
        offset[to_int(axis)] = before
        before = before + shape[to_int(axis)]
        results.append(offset)
    return results


def broadcast_over(node: Node, a: Array, b: Array) -> Array:
    rank = max(len(a), len(b))
    padded = [[1] * (rank - len(s)) + list(s) for s in (a, b)]
    over: list[list[int]] = [[], []]
    if list(a) == list(b) and UNKNOWN not in padded[0]:
        return [np.array(axes, object) for axes in over]
    for axis, (d, e) in enumerate(zip(*padded, strict=True)):
        if d != e and 1 not in (d, e):
            raise ValueError("one of the sizes may be 1")
        for which, this, that, shape in ((0, d, e, a), (1, e, d, b)):
            missing = axis < rank - len(shape)
            if missing or (this == 1 and that != 1) or (d == 1 and e == 1):
                over[which].append(axis)
    if UNKNOWN in padded[0] or UNKNOWN in padded[1]:
        raise ValueError("a size that is not known")
    return [np.array(axes, object) for axes in over]


def split(node: Node, array: Array, sizes: Array, axis: Array) -> Array:
    whole = array.shape[to_int(axis)]
    known = to_ints(split_sizes(to_ints(sizes), whole))
    if min(known) < 0 or sum(known) != whole:
        raise ValueError("the parts are not the whole")
    return np.split(array, np.cumsum(known)[:-1], to_int(axis))


def ranged(node: Node, *ends: Array) -> Array:
    numbers = range(*to_ints(ends))
    small_shape([len(numbers)])
    return np.array(numbers, object)


def tiled(node: Node, array: Array, times: Array) -> Array:
    small_shape([array.size, *times])
    return np.tile(array, to_ints(times))


def inverted(node: Node, order: Array) -> Array:
    numbers = to_ints(order)
    if sorted(numbers) != list(range(len(numbers))):
        raise ValueError("not a permutation")
    return np.argsort(numbers)


def small_shape(shape: Array) -> list[int]:
    """Return the sizes of a shape that is small enough for an array."""
    sizes = to_ints(shape)
    if math.prod(sizes) > LARGEST:
        raise ValueError("too large to be folded")
    return sizes


def to_ints(array: Array) -> list[int]:
    """Return the entries of a vector; all of them must be known."""
    return list(map(to_int, array))


def to_int(entry: object) -> int:
    """Return the only entry of an array; it must be known."""
    known = np.asarray(entry, dtype=object).item()
    if not isinstance(known, int | np.integer):
        raise ValueError(f"{known} is not known")
    return int(known)


def squeezed(node: Node, array: Array) -> Array:
    return np.squeeze(array, tuple(node.attr("squeeze_dims")) or None)


def filled(node: Node, shape: Array, entry: Array) -> Array:
    return np.full(small_shape(shape), entry[()], object)


def joined(node: Node, *arrays: Array) -> Array:
    return np.concatenate(arrays[:-1], to_int(arrays[-1]))


def split_evenly(node: Node, axis: Array, array: Array) -> Array:
    return np.split(array, node.num_outputs, to_int(axis))
