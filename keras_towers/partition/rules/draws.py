"""Random numbers that follow from a seed: each tower draws its own rows.

Philox (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
makes each group of numbers of a key and a count. The numbers of some rows are
those that begin at a later count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.builder import SIZE
from keras_towers.partition.conversions import local_shape, static
from keras_towers.partition.layouts import (
    Shape,
    Sharded,
    Value,
    Values,
    require,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, rule, shape_of
from keras_towers.partition.rules.shapes import rows_of_sizes, target_sizes
from keras_towers.partition.sizes import Size

_DRAWS = (
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
    "StatelessTruncatedNormalV2",
)
# How many numbers they take follows from what they draw.
_OTHERS = (
    "StatelessRandomGammaV3",
    "StatelessRandomBinomial",
    "StatelessRandomPoisson",
    "StatelessParameterizedTruncatedNormal",
)
# They are drawn once, as they have a state of TensorFlow's own.
_STATEFUL = (
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
)
# TensorFlow's numbers of the algorithms that are Philox on a CPU or a GPU.
_PHILOX = (1, 3)
# A count gives 16 bytes of random numbers, but at most four numbers.
_BYTES_PER_COUNT, _MOST_PER_COUNT = 16, 4
# How many TensorFlow reserves for one that may be rejected.
_RESERVED = 256
# What XLA takes for a uniform number that is less, before its logarithm.
_LEAST = 1e-7


@rule(*_DRAWS)
def _drawn(
    partition: Partitioner,
    node: Node,
    target: Value,
    key: Value,
    counter: Value,
    algorithm: Value,
    *limits: Value,
) -> Values:
    sizes = target_sizes(node, target)
    layout = rows_of_sizes(partition, sizes)
    require(not layout.axis and None not in sizes)
    require(algorithm.known is not None)
    require(algorithm.known.flat[0] in _PHILOX)
    build, dtype = partition.builder, node.output_dtype()
    rest: Any = math.prod(sizes[1:]) * layout.rows
    each = partition.size(rest)
    require(each)
    group = min(_MOST_PER_COUNT, _BYTES_PER_COUNT // dtype.size)
    counts = 1
    pairs = partition.xla and node.type == "StatelessRandomNormalV2"
    require(dtype == tf.float32 or not pairs)
    if node.type == "StatelessTruncatedNormalV2" and not partition.xla:
        counts = group * _RESERVED // _MOST_PER_COUNT
    of_all = [
        partition.replicated(value) for value in (key, algorithm, *limits)
    ]

    def draw(shape: Tensor, steps: Tensor, size: tf.TensorShape) -> Tensor:
        operands = [shape, of_all[0], _later(partition, counter, steps)]
        operands += of_all[1:]
        if pairs:
            return build.op(
                "StatelessRandomUniformV2", operands, size, dtype=dtype
            )
        (numbers,) = build.copy(node.operation, operands, [size])
        return numbers

    size = local_shape(static(sizes), layout)
    shape = partition.local_target(target, sizes, layout)
    start, count = layout.unit.start, layout.unit.count
    if not pairs and not isinstance(rest, Size) and not rest % group:
        steps = partition.times(rest // group * counts, start)
        local = draw(shape, steps, size)
        return [Value(layout, local, shape=tuple(sizes))]

    def numbers(begin: Tensor, length: Tensor) -> Tensor:
        """Draw some numbers, of which the first are some of a group."""
        steps = build.op("FloorDiv", [begin, group], ())
        more = build.op("AddV2", [length, group], (), is_repeated=True)
        drawn = draw(
            partition.vector([more], shape.dtype),
            partition.times(counts, steps),
            tf.TensorShape([None]),
        )
        first = build.op("FloorMod", [begin, group], ())
        ends = [partition.vector([end], SIZE) for end in (first, length)]
        return build.op("Slice", [drawn, *ends], (None,))

    if pairs:
        flat = _normal(partition, numbers, sizes, layout)
    else:
        begin = build.op("Mul", [start, each], ())
        length = build.op("Mul", [count, each], (), is_repeated=True)
        flat = numbers(begin, length)
    local = build.op("Reshape", [flat, shape], size)
    return [Value(layout, local, shape=tuple(sizes))]


def _normal(
    partition: Partitioner,
    numbers: Callable[[Tensor, Tensor], Tensor],
    sizes: Sequence[Any],
    layout: Sharded,
) -> Tensor:
    """Return a tower's rows of the normal numbers that XLA draws.

    XLA makes two normal numbers of two uniform ones (G. Box and M. Muller,
    1958), which follow one another along the first axis of even size, else
    along the longest: from row to row, or within each row.
    """
    build, inner, times = partition.builder, sizes[1:], partition.times
    total = partition.size(sizes[0])
    require(total and all(isinstance(size, int) for size in inner))

    def shaped(flat: Tensor, *ends: Tensor | int) -> Tensor:
        sizes = tf.TensorShape([None for _ in ends])
        return build.op("Reshape", [flat, partition.vector(ends, SIZE)], sizes)

    start = times(layout.rows, layout.unit.start)
    count = times(layout.rows, layout.unit.count)
    width = math.prod(inner)
    # From row to row: those of the tower, from an even one on.
    odd = build.op("FloorMod", [start, 2], ())
    first = build.op("Sub", [start, odd], ())
    half = build.op("AddV2", [count, 2], (), is_repeated=True)
    half = build.op("FloorDiv", [half, 2], (), is_repeated=True)
    flat = numbers(times(width, first), times(2 * width, half))
    flat = _normal_pairs(partition, shaped(flat, half, 2, width))
    flat = shaped(flat, times(2, half), width)
    ends = [partition.vector(end, SIZE) for end in ((odd, 0), (count, width))]
    by_rows = build.op("Slice", [flat, *ends], (None, width))
    if not inner:
        return by_rows
    # Within each row.
    even = [size % 2 == 0 for size in inner]
    longest = max(inner)
    axis = even.index(True) if any(even) else inner.index(longest)
    before, after = math.prod(inner[:axis]), math.prod(inner[axis + 1 :])
    pairs = -(-inner[axis] // 2)
    stride = before * 2 * pairs * after
    flat = numbers(times(stride, start), times(stride, count))
    flat = shaped(flat, times(before * pairs, count), 2, after)
    flat = _normal_pairs(partition, flat)
    flat = shaped(flat, times(before, count), 2 * pairs, after)
    within = build.op(
        "Slice",
        [flat, [0, 0, 0], [-1, inner[axis], -1]],
        (None, inner[axis], after),
    )
    within = shaped(within, count, width)
    remainder = build.op("FloorMod", [total, 2], ())
    follow = build.op("Equal", [remainder, 0], ())
    if not any(even):
        is_longest = build.op("GreaterEqual", [total, longest], ())
        follow = build.op("LogicalOr", [follow, is_longest], ())
    return build.op("SelectV2", [follow, by_rows, within], (None, width))


def _normal_pairs(partition: Partitioner, uniform: Tensor) -> Tensor:
    """Return normal numbers, given uniform ones of shape [n, 2, m]."""
    build, shape = partition.builder, uniform.shape

    def op(type_: str, *operands: Any) -> Tensor:
        return build.op(type_, operands, shape)

    def part(index: int) -> Tensor:
        ends = [0, index, 0], [-1, 1, -1]
        return build.op("Slice", [uniform, *ends], (None, 1, None))

    radius = op("Log", op("Maximum", part(0), _LEAST))
    radius = op("Sqrt", op("Mul", radius, -2.0))
    angle = op("Mul", part(1), 2 * math.pi)
    sine = op("Mul", op("Sin", angle), [[1.0], [0.0]])
    cosine = op("Mul", op("Cos", angle), [[0.0], [1.0]])
    return op("Mul", radius, op("AddV2", sine, cosine))


def _later(partition: Partitioner, counter: Value, steps: Tensor) -> Tensor:
    """Advance a counter, whose words are in little-endian order."""
    build, start = partition.builder, partition.replicated(counter)
    more = partition.vector([steps, 0], start.dtype)
    return build.op("AddV2", [start, more], start.shape)


@shape_of(*_DRAWS, *_OTHERS, *_STATEFUL)
def _shape_of_draw(node: Node, target: Value, *rest: Value) -> Shape:
    return tuple(target_sizes(node, target))
