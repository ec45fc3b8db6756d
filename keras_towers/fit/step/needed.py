"""The operations on which the results and variables of a step depend.

Rank 0 alone may do more, such as write a summary: other ranks need not trace
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keras_towers.partition.effects import called_graphs, written

# Calls whose functions take their last inputs.
_CALLS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "Stateless", "Stateful")
    for name in ("PartitionedCall", "If", "Case", "While")
)
Needed = dict[Any, dict[str, Any]]


def needed_operations(graph: Any, ends: Iterable[Any]) -> Needed:
    """Return the operations, by graph and name, including called functions.

    Args:
        graph: a traced graph.
        ends: operations that are needed besides those that write variables.
    """
    needed: Needed = {}
    _add(needed, graph, ends)
    return needed


def _add(needed: Needed, graph: Any, ends: Iterable[Any]) -> None:
    """Add the needed operations of a graph, and of functions that it calls."""
    found: dict[str, Any] = {}
    needed[graph] = found
    waiting = [*ends, *(o for o in graph.get_operations() if written(o))]
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found[operation.name] = operation
            waiting += [tensor.op for tensor in _operands(needed, operation)]


def _operands(needed: Needed, operation: Any) -> list[Any]:
    """Return the inputs that an operation needs."""
    graphs = called_graphs(operation)
    for graph in graphs:
        if graph is not None and graph not in needed:
            _add(needed, graph, [tensor.op for tensor in graph.outputs])
    inputs = list(operation.inputs)
    if operation.type not in _CALLS or not graphs or None in graphs:
        return inputs
    first = len(inputs) - len(graphs[0].inputs)
    used = {
        first + k
        for graph in graphs
        for k, inside in enumerate(graph.inputs)
        if inside.op.name in needed[graph]
    }
    return [t for k, t in enumerate(inputs) if k < first or k in used]
