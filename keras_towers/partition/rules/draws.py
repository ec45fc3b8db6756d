"""Random numbers from a seed: each tower draws the numbers of its rows.

Philox (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
computes each group of numbers from a key and a counter. The numbers of later
rows start at a larger counter.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_towers.partition.builder import SIZE_DTYPE
from keras_towers.partition.layouts import (
    NotDivided,
    Shape,
    Value,
    Values,
    local_shape,
    require,
    static,
    unless_none,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, rule, shape_of
from keras_towers.partition.sizes import UNKNOWN, Size

_DRAWS = (
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
    "StatelessTruncatedNormalV2",
)
# The number of counters that they use depends on the numbers drawn.
_OTHERS = (
    "StatelessRandomGammaV3",
    "StatelessRandomBinomial",
    "StatelessRandomPoisson",
    "StatelessParameterizedTruncatedNormal",
)
# They have a hidden state, and are drawn once.
_STATEFUL = (
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
)
# The ids of the algorithms that are Philox on a CPU or a GPU.
_PHILOX = (1, 3)
# A counter yields 16 random bytes, but at most four numbers.
_BYTES_PER_COUNT, _MOST_PER_COUNT = 16, 4
# The number of counters reserved for a number that may be rejected.
_RESERVED = 256


@rule(*_DRAWS)
def _draw(
    node: Node,
    target: Value,
    key: Value,
    counter: Value,
    algorithm: Value,
    *limits: Value,
) -> Values:
    partitioner = node.partitioner
    sizes = node.requested_shape(target)
    layout = partitioner.find_row_axis(sizes)
    require(not layout.axis and UNKNOWN not in sizes)
    require(algorithm.number in _PHILOX)
    if partitioner.options.xla and node.type == "StatelessRandomNormalV2":
        # XLA draws pairs of numbers, which may belong to different rows.
        partitioner.computed_once.append(node.operation)
        raise NotDivided
    dtype = node.output_dtype()
    rest: Any = math.prod(sizes[1:]) * layout.rows
    each = unless_none(partitioner.global_size(rest))
    group = min(_MOST_PER_COUNT, _BYTES_PER_COUNT // dtype.size)
    counts = 1
    if (
        node.type == "StatelessTruncatedNormalV2"
        and not partitioner.options.xla
    ):
        counts = group * _RESERVED // _MOST_PER_COUNT
    shared = [
        partitioner.replicate(value) for value in (key, algorithm, *limits)
    ]

    def draw(shape: Tensor, steps: Tensor, size: tf.TensorShape) -> Tensor:
        operands = [shape, shared[0], _advance(partitioner, counter, steps)]
        operands += shared[1:]
        (numbers,) = node.copy(operands, [size])
        return numbers

    size = local_shape(static(sizes), layout)
    shape = partitioner.local_target(target, sizes, layout)
    start, count = layout.unit.start, layout.unit.count
    if not isinstance(rest, Size) and not rest % group:
        steps = partitioner.scaled_size(rest // group * counts, start)
        local = draw(shape, steps, size)
        return [Value(layout, local, shape=sizes)]

    # The first number may be in the middle of a group.
    begin = partitioner.op("Mul", [start, each], ())
    length = partitioner.compute_size("Mul", count, each)
    more = partitioner.compute_size("AddV2", length, group)
    drawn = draw(
        partitioner.size_vector([more], shape.dtype),
        partitioner.scaled_size(
            counts, partitioner.op("FloorDiv", [begin, group], ())
        ),
        tf.TensorShape([None]),
    )
    first = partitioner.op("FloorMod", [begin, group], ())
    ends = [
        partitioner.size_vector([end], SIZE_DTYPE) for end in (first, length)
    ]
    flat = partitioner.op("Slice", [drawn, *ends], (None,))
    local = partitioner.op("Reshape", [flat, shape], size)
    return [Value(layout, local, shape=sizes)]


def _advance(partitioner: Partitioner, counter: Value, steps: Tensor) -> Tensor:
    """Advance a counter, whose words are in little-endian order."""
    start = partitioner.replicate(counter)
    more = partitioner.size_vector([steps, 0], start.dtype)
    return partitioner.op("AddV2", [start, more], start.shape)


@shape_of(*_DRAWS, *_OTHERS, *_STATEFUL)
def _drawn_shape(node: Node, target: Value, *rest: Value) -> Shape:
    return node.requested_shape(target)
