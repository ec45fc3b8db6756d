"""Exchanges with the other columns of a mesh, in the graph of one column.

There the call of a function that does not exist stands for an exchange.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

from keras_towers.partition.axes import COLUMNS, ONCE
from keras_towers.partition.builder import AttrValue, Builder
from keras_towers.partition.layouts import (
    REPLICATED,
    ListOf,
    Sharded,
    Value,
    Values,
    local_shape,
    replicated,
    sizes_of,
)
from keras_towers.partition.nodes import Node
from keras_towers.partition.program import Exchange, Operation
from keras_towers.partition.reasons import require

if TYPE_CHECKING:
    import tensorflow as tf

_FUNCTION = "keras_towers_exchange_over_columns"
_ATTRIBUTE = "_exchange_over_columns"
# Kinds that change the size of an axis.
_RESIZES = ("gather", "scatter")


def as_operation(exchange: Exchange) -> Operation:
    """Return an operation that stands for an exchange over columns."""
    builder, part, result = Builder(), exchange.given, exchange.result
    how = exchange.kind, exchange.axis, exchange.is_own
    builder.add(
        "PartitionedCall",
        [part],
        {
            "f": AttrValue(func={"name": _FUNCTION}),
            "Tin": [part.dtype],
            "Tout": [result.dtype],
            "_output_shapes": [result.shape],
            _ATTRIBUTE: json.dumps(how),
        },
        [(result.dtype, result.shape)],
    )
    (operation,) = builder.operations
    return operation


def is_over_columns(operation: tf.Operation) -> bool:
    """Whether an operation stands for an exchange over columns."""
    return bool(operation.node_def.attr[_ATTRIBUTE].s)


def exchange_over_columns(node: Node, *inputs: Value) -> Values:
    """Exchange what towers have, in whichever layout: all kinds are linear."""
    how = node.operation.node_def.attr[_ATTRIBUTE].s
    require(how)
    (value,) = inputs
    traced = node.shapes[0]
    kind, axis, is_own = json.loads(how)
    layout, sizes = value.layout, value.shape
    to = COLUMNS if is_own else ONCE
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
