"""Reads and writes of variables.

What a variable holds is a value like any other: the towers' functions take it,
and return new ones.
"""

from __future__ import annotations

import tensorflow as tf

from keras_towers.partition.layouts import (
    Value,
    Values,
    local_shape,
    require,
    sizes_of,
)
from keras_towers.partition.registry import Node, rule


@rule("Identity")
def _handle(node: Node, value: Value) -> Values:
    """Return the handle of a variable that is copied."""
    require(node.dtype(0) == tf.resource)
    return [value]


@rule("ReadVariableOp")
def _read(node: Node, variable: Value) -> Values:
    return [node.partitioner.content_of(variable)]


@rule("AssignVariableOp")
def _assign(node: Node, variable: Value, content: Value) -> Values:
    node.partitioner.assign(variable, content)
    return []


@rule("ResourceGather")
def _look_up(node: Node, variable: Value, indices: Value) -> Values:
    """Look rows up where their indices are."""
    partitioner = node.partitioner
    layout, own = indices.as_rows()
    require(not node.attr("batch_dims"))
    table = partitioner.replicate(partitioner.content_of(variable))
    rows = partitioner.op(
        "GatherV2",
        [table, own, 0],
        local_shape(node.shapes[0], layout),
        batch_dims=0,
    )
    shape = None
    if node.shapes[0].rank is not None:
        shape = (*indices.sizes, *sizes_of(node.shapes[0][indices.rank :]))
    return [Value(layout, rows, shape=shape)]
