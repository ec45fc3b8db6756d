"""Random numbers that follow from a seed: each tower draws its own rows.

Philox (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
makes each group of numbers of a key and a count. The numbers of some rows are
those that begin at a later count.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_towers.partition.builder import SIZE
from keras_towers.partition.layouts import (
    NotDivided,
    Value,
    Values,
    local_shape,
    require,
    static,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, rule, shape_of
from keras_towers.partition.rules.shapes import rows_of_sizes, target_sizes
from keras_towers.partition.sizes import UNKNOWN, Size

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


@rule(*_DRAWS)
def _drawn(
    node: Node,
    target: Value,
    key: Value,
    counter: Value,
    algorithm: Value,
    *limits: Value,
) -> Values:
    partition = node.partition
    sizes = target_sizes(node, target)
    layout = rows_of_sizes(partition, sizes)
    require(not layout.axis and UNKNOWN not in sizes)
    require(algorithm.number in _PHILOX)
    if partition.options.xla and node.type == "StatelessRandomNormalV2":
        # XLA draws them in pairs, which may be of two rows.
        partition.once.append(node.operation)
        raise NotDivided
    dtype = node.output_dtype()
    rest: Any = math.prod(sizes[1:]) * layout.rows
    each = partition.size(rest)
    require(each)
    group = min(_MOST_PER_COUNT, _BYTES_PER_COUNT // dtype.size)
    counts = 1
    if node.type == "StatelessTruncatedNormalV2" and not partition.options.xla:
        counts = group * _RESERVED // _MOST_PER_COUNT
    of_all = [
        partition.replicated(value) for value in (key, algorithm, *limits)
    ]

    def draw(shape: Tensor, steps: Tensor, size: tf.TensorShape) -> Tensor:
        operands = [shape, of_all[0], _later(partition, counter, steps)]
        operands += of_all[1:]
        (numbers,) = node.copy(operands, [size])
        return numbers

    size = local_shape(static(sizes), layout)
    shape = partition.local_target(target, sizes, layout)
    start, count = layout.unit.start, layout.unit.count
    if not isinstance(rest, Size) and not rest % group:
        steps = partition.times(rest // group * counts, start)
        local = draw(shape, steps, size)
        return [Value(layout, local, shape=sizes)]

    # The first of its numbers may be within a group.
    begin = partition.op("Mul", [start, each], ())
    length = partition.product(count, each)
    more = partition.calculated("AddV2", length, group)
    drawn = draw(
        partition.vector([more], shape.dtype),
        partition.times(counts, partition.op("FloorDiv", [begin, group], ())),
        tf.TensorShape([None]),
    )
    first = partition.op("FloorMod", [begin, group], ())
    ends = [partition.vector([end], SIZE) for end in (first, length)]
    flat = partition.op("Slice", [drawn, *ends], (None,))
    local = partition.op("Reshape", [flat, shape], size)
    return [Value(layout, local, shape=sizes)]


def _later(partition: Partitioner, counter: Value, steps: Tensor) -> Tensor:
    """Advance a counter, whose words are in little-endian order."""
    start = partition.replicated(counter)
    more = partition.vector([steps, 0], start.dtype)
    return partition.op("AddV2", [start, more], start.shape)


shape_of(*_DRAWS, *_OTHERS, *_STATEFUL)(target_sizes)
