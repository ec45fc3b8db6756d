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

from keras_towers.partition.conversions import SIZE, local_shape, static
from keras_towers.partition.layouts import Sharded, Value
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
) -> list[Value] | None:
    sizes = target_sizes(node, target)
    layout = rows_of_sizes(partition, sizes)
    if sizes is None or layout is None or layout.axis:
        return None
    known = algorithm.known
    if known is None or known.flat[0] not in _PHILOX:
        return None
    build, dtype = partition.builder, node.output_dtype()
    rest: Any = math.prod(size or 0 for size in sizes[1:]) * layout.rows
    each = partition.size(rest)
    if each is None or None in sizes:
        return None
    group = min(_MOST_PER_COUNT, _BYTES_PER_COUNT // dtype.size)
    counts = 1
    pairs = partition.xla and node.type == "StatelessRandomNormalV2"
    if pairs and dtype != tf.float32:
        return None
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
        width = build.constant(group, SIZE)
        steps = build.op("FloorDiv", [begin, width], ())
        more = build.op("AddV2", [length, width], (), is_repeated=True)
        drawn = draw(
            partition.vector([more], shape.dtype),
            partition.times(counts, steps),
            tf.TensorShape([None]),
        )
        own = [
            partition.vector([end], SIZE)
            for end in (build.op("FloorMod", [begin, width], ()), length)
        ]
        return build.op("Slice", [drawn, *own], (None,))

    if pairs:
        flat = _normal(partition, numbers, sizes, layout)
        if flat is None:
            return None
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
) -> Tensor | None:
    """Return a tower's rows of the normal numbers that XLA draws.

    XLA makes two normal numbers of two uniform ones (G. Box and M. Muller,
    1958), which follow one another along the first axis of even size, else
    along the longest: from row to row, or within each row.
    """
    build, inner = partition.builder, sizes[1:]
    total, rows = partition.size(sizes[0]), partition.size(layout.rows)
    if (
        total is None
        or rows is None
        or not all(isinstance(size, int) for size in inner)
    ):
        return None

    def op(type_: str, *operands: Any) -> Tensor:
        tensors = [
            operand
            if isinstance(operand, Tensor)
            else build.constant(operand, SIZE)
            for operand in operands
        ]
        return build.op(type_, tensors, (), is_repeated=True)

    def shaped(flat: Tensor, *ends: Any) -> Tensor:
        every = [
            e if isinstance(e, Tensor) else op("Identity", e) for e in ends
        ]
        sizes = tf.TensorShape([None for _ in ends])
        return build.op("Reshape", [flat, partition.vector(every, SIZE)], sizes)

    start = build.op("Mul", [layout.unit.start, rows], ())
    count = op("Mul", layout.unit.count, rows)
    width = math.prod(inner)
    # From row to row: those of the tower, from an even one on.
    odd = build.op("FloorMod", [start, build.constant(2, SIZE)], ())
    first = build.op("Sub", [start, odd], ())
    half = op("FloorDiv", op("AddV2", count, 2), 2)
    flat = numbers(partition.times(width, first), op("Mul", half, 2 * width))
    flat = _normal_pairs(partition, shaped(flat, half, 2, width))
    ends = [
        partition.vector([a, b], SIZE)
        for a, b in (
            (odd, build.constant(0, SIZE)),
            (count, build.constant(width, SIZE)),
        )
    ]
    flat = shaped(flat, op("Mul", half, 2), width)
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
    flat = numbers(partition.times(stride, start), op("Mul", count, stride))
    flat = _normal_pairs(
        partition, shaped(flat, op("Mul", count, before * pairs), 2, after)
    )
    flat = shaped(flat, op("Mul", count, before), 2 * pairs, after)
    within = build.op(
        "Slice",
        [
            flat,
            build.constant([0, 0, 0], SIZE),
            build.constant([-1, inner[axis], -1], SIZE),
        ],
        (None, inner[axis], after),
    )
    within = shaped(within, count, width)
    two, zero = build.constant(2, SIZE), build.constant(0, SIZE)
    remainder = build.op("FloorMod", [total, two], ())
    follow = build.op("Equal", [remainder, zero], ())
    if not any(even):
        is_longest = build.op(
            "GreaterEqual", [total, build.constant(longest, SIZE)], ()
        )
        follow = build.op("LogicalOr", [follow, is_longest], ())
    return build.op("SelectV2", [follow, by_rows, within], (None, width))


def _normal_pairs(partition: Partitioner, uniform: Tensor) -> Tensor:
    """Return normal numbers, given uniform ones of shape [n, 2, m]."""
    build, shape = partition.builder, uniform.shape

    def op(type_: str, *operands: Any) -> Tensor:
        tensors = [
            operand
            if isinstance(operand, Tensor)
            else build.constant(operand, tf.float32)
            for operand in operands
        ]
        return build.op(type_, tensors, shape)

    def part(index: int) -> Tensor:
        begin = build.constant([0, index, 0], SIZE)
        size = build.constant([-1, 1, -1], SIZE)
        return build.op("Slice", [uniform, begin, size], (None, 1, None))

    radius = op("Log", op("Maximum", part(0), _LEAST))
    radius = op("Sqrt", op("Mul", radius, -2.0))
    angle = op("Mul", part(1), 2 * math.pi)
    sine = op("Mul", op("Sin", angle), [[1.0], [0.0]])
    cosine = op("Mul", op("Cos", angle), [[0.0], [1.0]])
    return op("Mul", radius, op("AddV2", sine, cosine))


def _later(partition: Partitioner, counter: Value, steps: Tensor) -> Tensor:
    """Advance a counter, whose words are in little-endian order."""
    build, start = partition.builder, partition.replicated(counter)
    more = partition.vector([steps, build.constant(0, SIZE)], start.dtype)
    return build.op("AddV2", [start, more], start.shape)


@shape_of(*_DRAWS, *_OTHERS, *_STATEFUL)
def _shape_of_draw(node: Node, target: Value, *rest: Value) -> Any:
    sizes = target_sizes(node, target)
    return None if sizes is None else tuple(sizes)
