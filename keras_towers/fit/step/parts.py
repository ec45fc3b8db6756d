"""A tower's part of the random draw for the global batch."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.rows import Rows

# Numbers that one step of Philox's counter gives, by size of the data type.
_WIDE, _GROUP_OF_WIDE, _GROUP = 8, 2, 4

# How many numbers TensorFlow reserves for one that it may have to reject.
_RESERVED = 256
_PER_COUNT = 4


def advanced(
    original: Callable[..., tf.Tensor],
    given: dict[str, Any],
    rows: Rows,
    blocks: tuple[int, ...],
    reserves: bool,
) -> tf.Tensor:
    """Draw a tower's rows of the whole draw by starting at a later count."""
    shape = given["shape"]
    tail = compat.constant_value_as_shape(shape)[1:]
    dtype = tf.as_dtype(_dtype(original, given))
    group = _GROUP_OF_WIDE if dtype.size == _WIDE else _GROUP
    counts = group * _RESERVED // _PER_COUNT if reserves else 1
    size: Any = tail.num_elements() if tail.is_fully_defined() else None
    whole_groups = size is not None and size % group == 0
    if size is None:
        size = tf.reduce_prod(tf.cast(shape[1:], tf.int64))
    drawn = []
    for first, length in _places(shape[0], rows, blocks):
        mine, into = dict(given), shape
        if len(blocks) > 1:
            # Otherwise the shape is known better as it was given.
            length = tf.cast(length, shape.dtype)
            into = tf.concat([length[tf.newaxis], shape[1:]], 0)
        mine["shape"] = into
        first = tf.cast(first, tf.int64)
        if whole_groups:
            steps = first * (size // group * counts)
            mine["counter"] = _later(given["counter"], steps)
            drawn.append(original(**mine))
            continue
        begin = first * size
        mine["counter"] = _later(given["counter"], begin // group * counts)
        # The numbers before the first row are some of a group. XLA needs to
        # know how many there are in all.
        length = tf.cast(into[0], tf.int64) * size
        mine["shape"] = (length + group)[tf.newaxis]
        numbers = tf.slice(original(**mine), [begin % group], [length])
        drawn.append(tf.reshape(numbers, into))
    return drawn[0] if len(drawn) == 1 else tf.concat(drawn, 0)


def _dtype(original: Callable[..., Any], given: dict[str, Any]) -> Any:
    if "dtype" in given:
        return given["dtype"]
    if "minval" in given:
        return tf.convert_to_tensor(given["minval"]).dtype
    return inspect.signature(original).parameters["dtype"].default


def _later(counter: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
    """Advance a counter, whose words are in little-endian order."""
    low = counter[:1] + tf.cast(steps, tf.uint64)
    return tf.concat([low, counter[1:]], 0)


def _places(
    length: tf.Tensor, rows: Rows, blocks: tuple[int, ...]
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """First row and number of rows of each block, in the whole draw."""
    count, tower = rows.count, tower_lib.current()
    if rows.graph is not None and (tower is None or tower.values.assumes):
        count = _checked(count, length, sum(blocks))
    before = itertools.accumulate(blocks, initial=0)
    start = rows.first
    return [
        (rows.total * ahead + start * block, count * block)
        for ahead, block in zip(before, blocks, strict=False)
    ]


def of_whole(
    original: Callable[..., tf.Tensor],
    given: dict[str, Any],
    rows: Rows,
    axis: int,
    blocks: tuple[int, ...],
) -> tf.Tensor:
    """Make the draw of the global batch and take a tower's part."""
    mine = rows.count
    if "shape" in given:
        shape = given["shape"]
        mine = shape[axis]
        length = tf.cast(rows.total * sum(blocks), shape.dtype)
        given["shape"] = tf.concat(
            [shape[:axis], length[tf.newaxis], shape[axis + 1 :]], 0
        )
    places = [
        # XLA needs to know how many there are.
        first + tf.range(length)
        for first, length in _places(mine, rows, blocks)
    ]
    return tf.gather(original(**given), tf.concat(places, 0), axis=axis)


def padded(value: tf.Tensor, rows: Rows, axis: int, block: int) -> tf.Tensor:
    """Repeat a tower's entries to the size of the global batch."""
    places = tf.range(rows.total * block) - rows.first * block
    mine = tf.clip_by_value(places, 0, rows.count * block - 1)
    return tf.gather(value, mine, axis=axis)


def _checked(count: tf.Tensor, length: tf.Tensor, each: int) -> tf.Tensor:
    """Return the number of rows, if a draw has ``each`` times that length."""
    right = tf.equal(tf.cast(length, tf.int64), count * each)
    # Assert would put the draws of all towers in order, one after another.
    zero = tf.debugging.check_numerics(
        tf.where(right, 0.0, math.nan),
        'random="global": the rows of a random draw do not belong to the '
        f"examples of the batch, {each} to each, as they seemed to. Give the "
        'strategy random="tower".',
    )
    return count + tf.cast(zero, tf.int64)
