"""Calls of functions, and branches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_towers.partition.builder import Builder, attribute
from keras_towers.partition.called_functions import (
    Draft,
    called,
    closed,
    dtypes_of,
    graph_of,
    inside,
    joined,
    laid_out,
    with_parts_or_sums,
)
from keras_towers.partition.conversions import local_shape
from keras_towers.partition.layouts import REPLICATED, Value
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import Node, rule
from keras_towers.partition.rules.means import laid_out_own_mean


@rule("PartitionedCall", "StatefulPartitionedCall")
def _called(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    """The operations of a function take the place of its call."""
    is_named = node.type.endswith("PartitionedCall")
    graph = graph_of(node, node.attr("f").name if is_named else node.type)
    if graph is None:
        return None
    means = laid_out_own_mean(partition, graph, inputs)
    if means is not None:
        return [means]
    # Gradients may have added outputs to the graph since it was called.
    return partition.call(graph, inputs)[: node.num_outputs]


@rule("If", "StatelessIf", "Case", "StatelessCase")
def _branched(
    partition: Partitioner, node: Node, chosen: Value, *inputs: Value
) -> list[Value] | None:
    graphs = [graph_of(node, name, ahead=1) for name in _names(node)]
    if None in graphs:
        return None
    known = None if chosen.known is None else np.ravel(chosen.known)[0]
    if isinstance(known, (bool, int)) and chosen.shape == ():
        # The last branch is that of all other numbers.
        at = int(known) if 0 <= known < len(graphs) else -1
        return partition.call(graphs[at], inputs)[: node.num_outputs]
    divided = not all(value.is_replicated for value in (chosen, *inputs))
    if partition.builder.meets and not divided:
        return None
    return with_parts_or_sums(
        partition,
        inputs,
        functools.partial(_laid_out, partition, node, graphs, chosen),
    )


def _names(node: Node) -> list[str]:
    if node.type.endswith("Case"):
        return [branch.name for branch in node.attr("branches")]
    return [node.attr(f"{name}_branch").name for name in ("else", "then")]


def _laid_out(
    partition: Partitioner,
    node: Node,
    graphs: Sequence[Any],
    chosen: Value,
    inputs: Sequence[Value],
) -> list[Value] | None:
    # All towers go the same way.
    way = partition.local(chosen)
    branches = [partition.inside(Builder(meets=False)) for _ in graphs]
    ends = []
    for branch, graph in zip(branches, graphs, strict=True):
        own = [inside(partition, value) for value in inputs]
        ends.append(branch.call(graph, own)[: node.num_outputs])
    results = [
        functools.reduce(joined, values, values[0])
        for values in zip(*ends, strict=True)
    ]
    layouts = [result.layout for result in results]
    if partition.builder.meets and all(own == REPLICATED for own in layouts):
        # What all towers would do alike is better done once.
        return None
    drafts = []
    for branch, values in zip(branches, ends, strict=True):
        outputs = [
            laid_out(branch, value, layout)
            for value, layout in zip(values, layouts, strict=True)
        ]
        drafts.append(Draft(branch.builder, (), outputs))
    made, given = closed(drafts)
    dtypes = dtypes_of(node.operation.outputs)
    attributes = {"Tin": dtypes_of(given), "Tout": dtypes}
    functions: dict[str, Any] = {"branches": made}
    if not node.type.endswith("Case"):
        functions = {"else_branch": made[0], "then_branch": made[1]}
        attributes["Tcond"] = attribute(way.dtype)
    specs = [
        (tensor.dtype, local_shape(tensor.shape, layout))
        for tensor, layout in zip(node.operation.outputs, layouts, strict=True)
    ]
    found = called(partition, node, [way, *given], attributes, specs, functions)
    for result, tensor in zip(results, found, strict=True):
        result.local = tensor
    return results
