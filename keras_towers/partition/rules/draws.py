"""Random numbers that follow from a seed: each tower draws its own rows.

Philox (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
makes each group of numbers of a key and a count. The numbers of some rows are
those that begin at a later count.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_towers.partition.conversions import SIZE, local_shape, static
from keras_towers.partition.layouts import Value
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
# How many numbers a count gives: 128 bits, but no more than four.
_BITS, _MOST = 16, 4
# How many TensorFlow reserves for one that may be rejected.
_RESERVED = 256


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
    group = min(_MOST, _BITS // dtype.size)
    counts = 1
    if node.type == "StatelessTruncatedNormalV2":
        counts = group * _RESERVED // _MOST
    of_all = [partition.local(value) for value in (key, algorithm, *limits)]

    def draw(shape: Tensor, steps: Tensor, size: tf.TensorShape) -> Tensor:
        given = [shape, of_all[0], _later(partition, counter, steps)]
        (numbers,) = build.copy(node.operation, [*given, *of_all[1:]], [size])
        return numbers

    size = local_shape(static(sizes), layout)
    shape = partition.local_target(target, sizes, layout)
    start, count = layout.unit.start, layout.unit.count
    if not isinstance(rest, Size) and not rest % group:
        steps = partition.times(rest // group * counts, start)
        local = draw(shape, steps, size)
        return [Value(layout, local, shape=tuple(sizes))]
    # The numbers before the first row are some of a group.
    width = build.constant(group, SIZE)
    begin = build.op("Mul", [start, each], ())
    steps = build.op("FloorDiv", [begin, width], ())
    length = build.op("Mul", [count, each], (), is_repeated=True)
    more = build.op("AddV2", [length, width], (), is_repeated=True)
    numbers = draw(
        partition.vector([more], shape.dtype),
        partition.times(counts, steps),
        tf.TensorShape([None]),
    )
    ends = [
        partition.vector([end], SIZE)
        for end in (build.op("FloorMod", [begin, width], ()), length)
    ]
    flat = build.op("Slice", [numbers, *ends], (None,))
    local = build.op("Reshape", [flat, shape], size)
    return [Value(layout, local, shape=tuple(sizes))]


def _later(partition: Partitioner, counter: Value, steps: Tensor) -> Tensor:
    """Advance a counter, whose words are in little-endian order."""
    build, start = partition.builder, partition.local(counter)
    more = partition.vector([steps, build.constant(0, SIZE)], start.dtype)
    return build.op("AddV2", [start, more], start.shape)


@shape_of(*_DRAWS, *_OTHERS, *_STATEFUL)
def _of_drawn(node: Node, target: Value, *rest: Value) -> Any:
    sizes = target_sizes(node, target)
    return None if sizes is None else tuple(sizes)
