"""Optional values, by which branches leave to gradients what they computed.

One is laid out as a list that has one element, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_towers.partition.builder import AttrValue
from keras_towers.partition.layouts import (
    REPLICATED,
    ListOf,
    Partial,
    Sharded,
    Value,
)
from keras_towers.partition.lists import Elements
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner, local_shape
from keras_towers.partition.registry import rule


@rule("OptionalNone", always=True, of_lists=True)
def _nothing(partition: Partitioner, node: Node) -> list[Value] | None:
    (found,) = partition.computed_once(node, ())
    found.element = Elements(None, is_optional=True)
    return [found]


@rule("OptionalFromValue", always=True, of_lists=True)
def _wrapped(
    partition: Partitioner, node: Node, *values: Value
) -> list[Value] | None:
    if len(values) != 1:
        return None
    (value,) = values
    element = Elements(
        None,
        shape=value.shape,
        known=value.known,
        element=value.element,
        is_empty=False,
        is_optional=True,
    )
    if value.is_replicated:
        (found,) = partition.computed_once(node, values)
        found.element = element
        return [found]
    layout = value.layout
    if not isinstance(layout, Sharded | Partial | ListOf):
        return None
    assert value.local is not None
    (local,) = partition.builder.copy(node.operation, [value.local])
    return [Value(ListOf(layout), local, element=element)]


@rule("OptionalGetValue", always=True, of_lists=True)
def _unwrapped(
    partition: Partitioner, node: Node, value: Value
) -> list[Value] | None:
    element, layout = value.element, value.layout
    if isinstance(layout, ListOf):
        if value.local is None or node.num_outputs != 1:
            return None
        shapes = [local_shape(node.shapes[0], layout.element)]
        (local,) = partition.builder.copy(
            node.operation,
            [value.local],
            shapes,
            {"output_shapes": _attribute(shapes)},
        )
        found = [Value(layout.element, local)]
    else:
        found = partition.computed_once(node, [value])
    if element is not None and not element.is_empty and len(found) == 1:
        found[0].shape, found[0].known = element.shape, element.known
        found[0].element = element.element
    return found


@rule("OptionalHasValue", of_lists=True)
def _is_there(
    partition: Partitioner, node: Node, value: Value
) -> list[Value] | None:
    if value.local is None:
        return None
    (local,) = partition.builder.copy(node.operation, [value.local])
    return [Value(REPLICATED, local)]


def _attribute(shapes: Sequence[Any]) -> Any:
    protos = [shape.as_proto() for shape in shapes]
    return AttrValue(list=AttrValue.ListValue(shape=protos))
