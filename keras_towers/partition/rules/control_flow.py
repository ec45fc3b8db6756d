"""Calls of functions, and branches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_towers.partition.builder import Builder, NeedsExchange, attribute
from keras_towers.partition.functions import (
    called,
    captured,
    dtypes_of,
    graph_of,
    inside,
    joined,
    laid_out,
    summed,
)
from keras_towers.partition.layouts import REPLICATED, Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner, local_shape
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.registry import rule


@rule("PartitionedCall", "StatefulPartitionedCall", always=True)
def _called(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    """The operations of a function take the place of its call."""
    is_named = node.type.endswith("PartitionedCall")
    graph = graph_of(node, node.attr("f").name if is_named else node.type)
    if graph is None:
        return None
    # Gradients may have added outputs to the graph since it was called.
    return partition.call(graph, inputs)[: node.num_outputs]


@rule("If", "StatelessIf", "Case", "StatelessCase", always=True)
def _branched(
    partition: Partitioner, node: Node, chosen: Value, *inputs: Value
) -> list[Value] | None:
    names = _names(node)
    known = None if chosen.known is None else np.ravel(chosen.known)[0]
    if isinstance(known, (bool, int)) and chosen.shape == ():
        # The last branch is that of all other numbers.
        at = int(known) if 0 <= known < len(names) else -1
        graph = graph_of(node, names[at], ahead=1)
        if graph is None:
            return None
        return partition.call(graph, inputs)[: node.num_outputs]
    divided = not all(value.is_replicated for value in (chosen, *inputs))
    if partition.builder.meets and not divided:
        return None
    graphs = [graph_of(node, name, ahead=1) for name in names]
    if None in graphs:
        return None
    # All towers go the same way.
    way = partition.local(chosen)
    before = len(partition.once)
    try:
        found = _laid_out(partition, node, graphs, way, inputs)
    except NeedsExchange:
        if not any(value.is_partial for value in inputs):
            return None
        del partition.once[before:]
        whole = [summed(partition, value) for value in inputs]
        try:
            found = _laid_out(partition, node, graphs, way, whole)
        except NeedsExchange:
            return None
    # What all towers would do alike is better done once.
    is_divided = not partition.builder.meets or any(
        value.layout != REPLICATED for value in found
    )
    return found if is_divided else None


def _names(node: Node) -> list[str]:
    if node.type.endswith("Case"):
        return [branch.name for branch in node.attr("branches")]
    return [node.attr(f"{name}_branch").name for name in ("else", "then")]


def _laid_out(
    partition: Partitioner,
    node: Node,
    graphs: Sequence[Any],
    way: Tensor,
    inputs: Sequence[Value],
) -> list[Value]:
    branches, ends = [], []
    for graph in graphs:
        branch = partition.inside(Builder(meets=False))
        own = [inside(partition, value) for value in inputs]
        ends.append(branch.call(graph, own)[: node.num_outputs])
        branches.append(branch)
    results = [
        functools.reduce(joined, values) for values in zip(*ends, strict=True)
    ]
    outputs = [
        [
            laid_out(branch, value, result.layout)
            for value, result in zip(values, results, strict=True)
        ]
        for branch, values in zip(branches, ends, strict=True)
    ]
    closed = [
        captured(branch.builder, (), found)
        for branch, found in zip(branches, outputs, strict=True)
    ]
    given = list(dict.fromkeys(t for _, others in closed for t in others))
    made = [
        Function(given, found, operations)
        for found, (operations, _) in zip(outputs, closed, strict=True)
    ]
    functions: dict[str, Any] = {"branches": made}
    attributes = {"Tin": dtypes_of(given), "Tout": dtypes_of(outputs[0])}
    if not node.type.endswith("Case"):
        functions = {"else_branch": made[0], "then_branch": made[1]}
        attributes["Tcond"] = attribute(way.dtype)
    specs = [
        (tensor.dtype, local_shape(shape, result.layout))
        for tensor, shape, result in zip(
            outputs[0], node.shapes, results, strict=True
        )
    ]
    every = [way, *given]
    made_of = called(partition, node, every, attributes, specs, functions)
    for result, tensor in zip(results, made_of, strict=True):
        result.local = tensor
    return results
