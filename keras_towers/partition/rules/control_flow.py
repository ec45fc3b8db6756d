"""Calls of functions, branches, and loops whose rounds each tower does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.called_functions import (
    called,
    closed,
    graph_of,
    joined,
    looped,
    source,
    tensor_with_layout,
    value_in_function,
    with_parts_or_sums,
)
from keras_towers.partition.layouts import (
    REPLICATED,
    NotDivided,
    Value,
    Values,
    local_shape,
    require,
    sizes_of,
)
from keras_towers.partition.list_elements import alike
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.registry import Node, rule
from keras_towers.partition.rules.loops_over_rows import over_rows
from keras_towers.partition.rules.means import lay_out_own_mean
from keras_towers.partition.sizes import UNKNOWN


@rule("PartitionedCall", "StatefulPartitionedCall")
def _called(node: Node, *inputs: Value) -> Values:
    """The operations of a function take the place of its call."""
    partition = node.partition
    is_named = node.type.endswith("PartitionedCall")
    graph = graph_of(node, node.attr("f").name if is_named else node.type)
    means = lay_out_own_mean(partition, graph, inputs)
    if means is not None:
        return [means]
    # Gradients may have added outputs to the graph since it was called.
    return partition.call(graph, inputs)[: node.num_outputs]


@rule("If", "StatelessIf", "Case", "StatelessCase")
def _branched(node: Node, chosen: Value, *inputs: Value) -> Values:
    partition = node.partition
    graphs = [graph_of(node, name, ahead=1) for name in _names(node)]
    known = chosen.number
    if isinstance(known, (bool, int)) and chosen.shape == ():
        # The last branch is that of all other numbers.
        at = int(known) if 0 <= known < len(graphs) else -1
        return partition.call(graphs[at], inputs)[: node.num_outputs]
    _require_worth(partition, [chosen, *inputs])
    return with_parts_or_sums(
        partition,
        inputs,
        functools.partial(_lay_out_branches, node, graphs, chosen),
    )


def _require_worth(partition: Partitioner, values: Values) -> None:
    """Have what all towers would do alike be done once."""
    is_alike = all(value.is_replicated for value in values)
    require(not (partition.meets and is_alike))


def _names(node: Node) -> list[str]:
    if node.type.endswith("Case"):
        return [branch.name for branch in node.attr("branches")]
    return [node.attr(f"{name}_branch").name for name in ("else", "then")]


def _lay_out_branches(
    node: Node,
    graphs: Sequence[Any],
    chosen: Value,
    inputs: Values,
) -> Values:
    # All towers go the same way.
    partition = node.partition
    way = partition.replicated(chosen)
    branches = [partition.for_function() for _ in graphs]
    ends = []
    for branch, graph in zip(branches, graphs, strict=True):
        given = [value_in_function(partition, value) for value in inputs]
        ends.append(branch.call(graph, given)[: node.num_outputs])
    results = [
        functools.reduce(joined, values, values[0])
        for values in zip(*ends, strict=True)
    ]
    _require_worth(partition, results)
    layouts = [result.layout for result in results]
    functions = []
    for branch, values in zip(branches, ends, strict=True):
        outputs = [
            tensor_with_layout(branch, value, layout)
            for value, layout in zip(values, layouts, strict=True)
        ]
        functions.append(Function((), outputs, branch.operations))
    made, captures = closed(functions)
    attributes: dict[str, Any] = {
        "Tin": [tensor.dtype for tensor in captures],
        "Tout": [tensor.dtype for tensor in node.operation.outputs],
    }
    by_name: dict[str, Any] = {"branches": made}
    if not node.type.endswith("Case"):
        by_name = dict(zip(("else_branch", "then_branch"), made, strict=True))
        attributes["Tcond"] = way.dtype
    specs = [
        (tensor.dtype, local_shape(tensor.shape, layout))
        for tensor, layout in zip(node.operation.outputs, layouts, strict=True)
    ]
    tensors = called(node, [way, *captures], attributes, specs, by_name)
    for result, tensor in zip(results, tensors, strict=True):
        result.local = tensor
    return results


# ---- loops -------------------------------------------------------------------

# More rounds of the pass change nothing, or a loop cannot be followed.
_PASSES = 8


@rule("While", "StatelessWhile")
def _looped(node: Node, *inputs: Value) -> Values:
    partition = node.partition
    _require_worth(partition, inputs)
    body = graph_of(node, node.attr("body").name)
    condition = graph_of(node, node.attr("cond").name)
    require(len(body.outputs) == len(inputs))
    with contextlib.suppress(NotDivided):
        return over_rows(node, body, condition, inputs)
    return with_parts_or_sums(
        partition,
        inputs,
        functools.partial(_lay_out_loop, node, body, condition),
    )


def _lay_out_loop(
    node: Node,
    body: Any,
    condition: Any,
    inputs: Values,
) -> Values:
    # What changes from one round to the next.
    partition = node.partition
    carried = [
        index
        for index, tensor in enumerate(body.outputs)
        if source(tensor) is not body.inputs[index]
    ]
    require(all(body.inputs[k].dtype != tf.resource for k in carried))
    states = {k: joined(inputs[k], inputs[k]) for k in carried}
    before = len(partition.once)
    for _ in range(_PASSES):
        # What is computed once in the last pass counts.
        del partition.once[before:]
        inner, tensors, ends = _round(partition, body, inputs, states)
        joined_states = {k: joined(states[k], ends[k]) for k in carried}
        if all(alike(states[k], joined_states[k]) for k in carried):
            break
        states = joined_states
    else:
        raise NotDivided
    _require_worth(partition, [*states.values()])
    operands, outputs = [], []
    for k, state in states.items():
        operands.append(tensor_with_layout(partition, inputs[k], state.layout))
        outputs.append(tensor_with_layout(inner, ends[k], state.layout))
    round_ = Function(tensors, outputs, inner.operations)
    inner, tensors, (end,) = _round(partition, condition, inputs, states)
    goes_on = tensor_with_layout(inner, end, REPLICATED)
    condition_ = Function(tensors, [goes_on], inner.operations)
    locals_ = looped(node, operands, round_, condition_)
    results = list(inputs)
    for k, tensor in zip(states, locals_, strict=False):
        results[k] = dataclasses.replace(states[k], local=tensor)
    return results


def _round(
    partition: Partitioner,
    graph: Any,
    inputs: Values,
    states: Mapping[int, Value],
) -> tuple[Partitioner, list[Tensor], Values]:
    """Lay out the body of a loop, or its condition.

    Args:
        partition: has the program around the loop.
        graph: the function.
        inputs: what the loop is given.
        states: those of them that change, as any round finds them.

    Returns:
        What has laid it out, the tensors that go round, and its outputs.
    """
    inner = partition.for_function()
    values = []
    tensors: list[Tensor] = []
    for index, value in enumerate(inputs):
        if index not in states:
            values.append(value_in_function(partition, value))
            continue
        like, state = graph.inputs[index], states[index]
        shape = local_shape(like.shape, state.layout)
        tensors.append(Tensor(like.dtype, shape, on_towers=True))
        values.append(_value_in_round(state, tensors[-1], like.shape))
    return inner, tensors, inner.call(graph, values)


def _value_in_round(
    state: Value, tensor: Tensor, shape: tf.TensorShape
) -> Value:
    """What goes round, as a round finds it."""
    sizes = state.shape
    if shape.rank is not None:
        sizes = tuple(
            static if size is UNKNOWN else size
            for size, static in zip(
                sizes or (UNKNOWN,) * shape.rank, sizes_of(shape), strict=True
            )
        )
    if state.layout == REPLICATED:
        return dataclasses.replace(state, whole=tensor, shape=sizes)
    return dataclasses.replace(state, local=tensor, shape=sizes)
