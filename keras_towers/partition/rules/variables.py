"""Reads and writes of variables.

What a variable holds is a value like any other: the towers' functions take it,
and return new ones.
"""

from __future__ import annotations

import tensorflow as tf

from keras_towers.partition.layouts import (
    REPLICATED,
    Value,
    Values,
    local_shape,
    replicated,
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


@rule("AssignAddVariableOp", "AssignSubVariableOp")
def _add_to(node: Node, variable: Value, term: Value) -> Values:
    """Assign the sum of what a variable holds and a term."""
    partitioner = node.partitioner
    before = partitioner.content_of(variable)
    after = partitioner.op(
        "AddV2" if node.type == "AssignAddVariableOp" else "Sub",
        [partitioner.replicate(before), partitioner.replicate(term)],
        before.sizes,
    )
    partitioner.assign(variable, replicated(after, Value(REPLICATED)))
    return []


@rule("VariableShape")
def _shape(node: Node, variable: Value) -> Values:
    partitioner = node.partitioner
    content = partitioner.replicate(partitioner.content_of(variable))
    shape = partitioner.op(
        "Shape", [content], node.shapes[0], out_type=node.output_dtype()
    )
    return [replicated(shape, Value(REPLICATED))]


@rule("ResourceGather")
def _look_up(node: Node, variable: Value, indices: Value) -> Values:
    """Look rows up where their indices are."""
    partitioner = node.partitioner
    require(not node.attr("batch_dims"))
    table = partitioner.replicate(partitioner.content_of(variable))
    rows = indices.sharded
    own = indices.local if rows else partitioner.replicate(indices)
    traced = node.shapes[0]
    found = partitioner.op(
        "GatherV2",
        [table, own, 0],
        local_shape(traced, indices.layout),
        batch_dims=0,
    )
    if rows is None:
        return [replicated(found, Value(REPLICATED))]
    shape = None
    if traced.rank is not None:
        shape = (*indices.sizes, *sizes_of(traced[indices.rank :]))
    return [Value(rows, found, shape=shape)]
