"""Exchanges between columns of a mesh, as operations in a column's graph.

TensorFlow has no operation for them, and only a call has a result of any shape.
So a call without a body stands for each exchange. ``Marks`` say which it is.
"""

from __future__ import annotations

import functools

from keras_towers.partition.ir.axes import COLUMNS, ONCE
from keras_towers.partition.ir.builder import AttrValue, Builder
from keras_towers.partition.ir.layouts import (
    REPLICATED,
    ListOf,
    Sharded,
    local_shape,
    sizes_of,
)
from keras_towers.partition.ir.program import Exchange, Operation
from keras_towers.partition.ir.values import Value, Values, replicated
from keras_towers.partition.layout.nodes import Node

_FUNCTION = "keras_towers_exchange_over_columns"
# Kinds that change the size of an axis.
_RESIZES = ("gather", "scatter")


def as_operation(exchange: Exchange) -> Operation:
    """Return an operation that stands for an exchange over columns."""
    builder, part, result = Builder(), exchange.given, exchange.result
    builder.add(
        "PartitionedCall",
        [part],
        {
            "f": AttrValue(func={"name": _FUNCTION}),
            "Tin": [part.dtype],
            "Tout": [result.dtype],
            "_output_shapes": [result.shape],
        },
        [(result.dtype, result.shape)],
    )
    (operation,) = builder.operations
    return operation


def exchange_over_columns(node: Node, *inputs: Value) -> Values:
    """Exchange a value of towers over columns, in any layout.

    All kinds of exchanges are linear.
    """
    exchange = node.scope.marks.exchanges[node.operation.name]
    (value,), traced = inputs, node.shapes[0]
    kind, axis = exchange.kind, exchange.axis
    layout, sizes = value.layout, value.shape
    to = COLUMNS if exchange.is_own else ONCE
    if sizes is not None and kind in _RESIZES:
        (moved,) = sizes_of([traced[axis]])
        sizes = (*sizes[:axis], moved, *sizes[axis + 1 :])
    exchanged = functools.partial(
        node.builder.exchange, kind, axis=axis, to=to, over=COLUMNS
    )
    along = isinstance(layout, Sharded) and layout.axis == axis
    if value.is_replicated:
        operand = node.converter.replicate(value)
    elif isinstance(layout, ListOf) or (along and kind in _RESIZES):
        operand = node.converter.assemble(value)
    else:
        result = exchanged(
            value.own, sizes=sizes, shape=local_shape(traced, layout)
        )
        return [Value(layout, result, shape=sizes)]
    result = exchanged(operand, sizes=sizes, shape=traced)
    return [replicated(result, Value(REPLICATED, shape=sizes))]
