"""Random numbers from a seed, such as dropout: a tower draws those of its rows.

Philox (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
computes each group of numbers from a key and a counter. The numbers of later
rows start at a larger counter.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_towers.partition.ir.builder import SIZE_DTYPE, static
from keras_towers.partition.ir.layouts import Sharded, local_shape
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import (
    SHAPE,
    NotDivided,
    require,
    unless_none,
)
from keras_towers.partition.ir.registry import operation
from keras_towers.partition.ir.sizes import UNKNOWN, Size
from keras_towers.partition.ir.values import Value, Values
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.rules.shapes import (
    made_of_shape,
    requested_shape,
)

# The ids of the algorithms that are Philox on a CPU or a GPU.
_PHILOX = (1, 3)
# A counter yields 16 random bytes, but at most four numbers.
_BYTES_PER_COUNT, _MOST_PER_COUNT = 16, 4
# The number of counters reserved for a number that may be rejected.
_RESERVED = 256


def _draw_rows(
    node: Node,
    layout: Sharded,
    target: Value,
    key: Value,
    counter: Value,
    algorithm: Value,
    *limits: Value,
) -> Values:
    builder, units, converter = node.builder, node.units, node.converter
    sizes = node.requested_shape(target)
    require(not layout.axis and layout.blocks == 1)
    require(UNKNOWN not in sizes, SHAPE)
    require(
        algorithm.number in _PHILOX, "{} does not draw by the Philox generator"
    )
    if node.options.xla and node.type == "StatelessRandomNormalV2":
        # XLA draws pairs of numbers, which may belong to different rows.
        reason = "XLA draws {} in pairs, which two rows may share"
        node.scope.computed_once[node.operation] = reason.format(node.type)
        raise NotDivided(reason)
    dtype = node.output_dtype()
    rest: Any = math.prod(sizes[1:]) * layout.rows
    each = unless_none(units.global_size(rest), SHAPE)
    group = min(_MOST_PER_COUNT, _BYTES_PER_COUNT // dtype.size)
    counts = 1
    if node.type == "StatelessTruncatedNormalV2" and not node.options.xla:
        counts = group * _RESERVED // _MOST_PER_COUNT
    first = converter.replicate(counter)
    shared = [converter.replicate(value) for value in (key, algorithm, *limits)]

    def draw(shape: Tensor, steps: Tensor, size: tf.TensorShape) -> Tensor:
        # The words of a counter are little-endian.
        more = builder.size_vector([steps, 0], first.dtype)
        own = builder.op("AddV2", [first, more], first.shape)
        operands = [shape, shared[0], own, *shared[1:]]
        (numbers,) = node.copy(operands, [size])
        return numbers

    size = local_shape(static(sizes), layout)
    shape = converter.local_target(target, sizes, layout)
    start, count = layout.unit.start, layout.unit.count
    if not isinstance(rest, Size) and not rest % group:
        steps = builder.scaled_size(rest // group * counts, start)
        local = draw(shape, steps, size)
        return [Value(layout, local, shape=sizes)]

    # The first number may be in the middle of a group.
    begin = builder.op("Mul", [start, each], ())
    length = builder.compute_size("Mul", count, each)
    more = builder.compute_size("AddV2", length, group)
    drawn = draw(
        builder.size_vector([more], shape.dtype),
        builder.scaled_size(counts, builder.op("FloorDiv", [begin, group], ())),
        tf.TensorShape([None]),
    )
    skipped = builder.op("FloorMod", [begin, group], ())
    ends = [builder.size_vector([end], SIZE_DTYPE) for end in (skipped, length)]
    flat = builder.op("Slice", [drawn, *ends], (None,))
    local = builder.op("Reshape", [flat, shape], size)
    return [Value(layout, local, shape=sizes)]


# fmt: off
operation("""
    StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessRandomUniformIntV2
    StatelessRandomUniformFullIntV2 StatelessTruncatedNormalV2
""", made_of_shape, rows=_draw_rows, shape=requested_shape(0), entry_work=256)
# The number of counters that the first four use depends on the numbers drawn.
# The others have a hidden state, and are drawn once.
operation("""
    StatelessRandomGammaV3 StatelessRandomBinomial StatelessRandomPoisson
    StatelessParameterizedTruncatedNormal
    RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal
""", shape=requested_shape(0), entry_work=256)
