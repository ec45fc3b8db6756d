"""Calls of functions, branches and loops."""

from __future__ import annotations

from keras_towers import compat
from keras_towers.partition.layouts import Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import rule


@rule("PartitionedCall", "StatefulPartitionedCall", always=True)
def _called(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    """The operations of a function take the place of its call."""
    name = node.attr("f").name
    graph = compat.graph_of_function(node.operation.graph, name)
    if graph is None:
        return None
    return partition.call(graph, inputs)
