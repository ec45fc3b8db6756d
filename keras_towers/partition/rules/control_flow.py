"""Calls of functions, branches, and loops that every tower runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.called_functions import (
    add_call,
    add_loop,
    bind_captures,
    called_graph,
    settle,
    skip_identities,
)
from keras_towers.partition.layouts import (
    REPLICATED,
    ListOf,
    NotDivided,
    Sharded,
    Value,
    Values,
    common_facts,
    local_shape,
    require,
    sizes_of,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.registry import Node, rule
from keras_towers.partition.rules.loops_over_rows import divide_rounds
from keras_towers.partition.rules.reductions import lay_out_own_mean
from keras_towers.partition.sizes import UNKNOWN


@rule("PartitionedCall", "StatefulPartitionedCall")
def _inline_call(node: Node, *inputs: Value) -> Values:
    partitioner = node.partitioner
    has_name = node.type.endswith("PartitionedCall")
    graph = called_graph(node, node.attr("f").name if has_name else node.type)
    means = lay_out_own_mean(partitioner, graph, inputs)
    if means is not None:
        return [means]
    # A gradient may have added outputs to the graph after this call.
    return partitioner.lay_out_function(graph, inputs)[: node.num_outputs]


def _require_towers_differ(values: Values) -> None:
    """Refuse to divide work that would be the same on all towers.

    In a function it saves time, too: each loop lays out its body several times,
    and so the loops in it.
    """
    require(not all(value.is_replicated for value in values))


def _require_known_units(partitioner: Partitioner, values: Values) -> None:
    """Refuse rows of a unit that only a function knows."""
    for value in values:
        layout = value.layout
        while isinstance(layout, ListOf):
            layout = layout.element
        if isinstance(layout, Sharded):
            require(partitioner.has_unit(layout.unit))


def _captured_value(partitioner: Partitioner, value: Value) -> Value:
    """Return a value of the surrounding program as a function sees it."""
    if not value.is_replicated:
        return dataclasses.replace(value, whole_from=None)
    return dataclasses.replace(
        value,
        layout=REPLICATED,
        local=None,
        whole=partitioner.replicate(value),
        whole_from=None,
    )


def _join_values(a: Value, b: Value) -> Value:
    """Join two possible values, as at the end of a branch.

    The result has their layout, and the facts that both share.

    Raises:
        NotDivided: they have different layouts.
    """
    layouts = [v.layout for v in (a, b) if not v.is_replicated]
    require(all(layout == layouts[0] for layout in layouts))
    return common_facts(a, b, layouts[0] if layouts else REPLICATED)


def _try_with_partial_sums(
    node: Node, inputs: Values, lay_out: Callable[[Values], Values]
) -> Values:
    """Lay out a call, if possible without adding up partial sums first.

    Args:
        node: the call.
        inputs: the inputs of the functions.
        lay_out: lays it out, given the inputs.

    Raises:
        NotDivided: the call has to be computed once.
    """
    partitioner = node.partitioner
    before = len(partitioner.once)
    while True:
        try:
            return lay_out(inputs)
        except NotDivided:
            del partitioner.once[before:]
        parts = [value for value in inputs if value.is_partial]
        require(parts)
        for value in parts:
            partitioner.assemble(value)


# ---- branches ----------------------------------------------------------------


@rule("If", "StatelessIf", "Case", "StatelessCase")
def _branch(node: Node, index: Value, *inputs: Value) -> Values:
    partitioner = node.partitioner
    graphs = [called_graph(node, name, 1) for name in _branch_names(node)]
    number = index.number
    if isinstance(number, (bool, int)) and index.shape == ():
        # An index that is out of range selects the last branch.
        taken = int(number) if 0 <= number < len(graphs) else -1
        return partitioner.lay_out_function(graphs[taken], inputs)[
            : node.num_outputs
        ]
    _require_towers_differ([index, *inputs])
    lay_out = functools.partial(_lay_out_branches, node, graphs, index)
    return _try_with_partial_sums(node, inputs, lay_out)


def _branch_names(node: Node) -> list[str]:
    if node.type.endswith("Case"):
        return [branch.name for branch in node.attr("branches")]
    return [node.attr(f"{name}_branch").name for name in ("else", "then")]


def _lay_out_branches(
    node: Node, graphs: Sequence[Any], index: Value, inputs: Values
) -> Values:
    partitioner = node.partitioner
    # All towers take the same branch.
    local_index = partitioner.replicate(index)
    branches = [partitioner.for_function() for _ in graphs]
    outputs_of_branches = []
    for branch, graph in zip(branches, graphs, strict=True):
        given = [_captured_value(partitioner, value) for value in inputs]
        outputs = branch.lay_out_function(graph, given)
        outputs_of_branches.append(outputs[: node.num_outputs])
    results = [
        functools.reduce(_join_values, values, values[0])
        for values in zip(*outputs_of_branches, strict=True)
    ]
    # In a function, what is computed once could not be exchanged.
    if partitioner.can_exchange:
        _require_towers_differ(results)
    _require_known_units(partitioner, results)
    functions = []
    for branch, values in zip(branches, outputs_of_branches, strict=True):
        tensors = [
            branch.to_layout(value, result.layout)
            for value, result in zip(values, results, strict=True)
        ]
        functions.append(Function((), tensors, branch.operations))
    bound, captures = bind_captures(functions)
    traced = node.operation.outputs
    attributes: dict[str, Any] = {
        "Tin": [tensor.dtype for tensor in captures],
        "Tout": [tensor.dtype for tensor in traced],
    }
    by_name: dict[str, Any] = {"branches": bound}
    if not node.type.endswith("Case"):
        by_name = dict(zip(("else_branch", "then_branch"), bound, strict=True))
        attributes["Tcond"] = local_index.dtype
    specs = [
        (tensor.dtype, local_shape(tensor.shape, result.layout))
        for tensor, result in zip(traced, results, strict=True)
    ]
    operands = [local_index, *captures]
    tensors = add_call(node, operands, attributes, specs, by_name)
    for result, tensor in zip(results, tensors, strict=True):
        result.local = tensor
    return results


# ---- loops -------------------------------------------------------------------


@rule("While", "StatelessWhile")
def _loop(node: Node, *inputs: Value) -> Values:
    _require_towers_differ(inputs)
    body = called_graph(node, node.attr("body").name)
    condition = called_graph(node, node.attr("cond").name)
    require(len(body.outputs) == len(inputs))
    with contextlib.suppress(NotDivided):
        return divide_rounds(node, body, condition, inputs)
    lay_out = functools.partial(_lay_out_loop, node, body, condition)
    return _try_with_partial_sums(node, inputs, lay_out)


def _lay_out_loop(
    node: Node, body: Any, condition: Any, inputs: Values
) -> Values:
    partitioner = node.partitioner
    loop_vars = [
        index
        for index, tensor in enumerate(body.outputs)
        if skip_identities(tensor) is not body.inputs[index]
    ]
    require(all(body.inputs[k].dtype != tf.resource for k in loop_vars))
    before = len(partitioner.once)

    def lay_out_round(states: Mapping[int, Value]) -> Any:
        # Only the last pass counts.
        del partitioner.once[before:]
        round_, tensors, ends = _lay_out_round(
            partitioner, body, inputs, states
        )
        after = {k: _join_values(states[k], ends[k]) for k in loop_vars}
        return (round_, tensors, ends), after

    (round_, tensors, ends), states = settle(
        {k: _join_values(inputs[k], inputs[k]) for k in loop_vars},
        lay_out_round,
    )
    if partitioner.can_exchange:
        _require_towers_differ([*states.values()])
    operands, outputs = [], []
    for k, state in states.items():
        operands.append(partitioner.to_layout(inputs[k], state.layout))
        outputs.append(round_.to_layout(ends[k], state.layout))
    new_body = Function(tensors, outputs, round_.operations)
    test, tensors, (end,) = _lay_out_round(
        partitioner, condition, inputs, states
    )
    continues = test.to_layout(end, REPLICATED)
    new_condition = Function(tensors, [continues], test.operations)
    results = list(inputs)
    local_results = add_loop(node, operands, new_body, new_condition)
    for k, tensor in zip(states, local_results, strict=False):
        results[k] = dataclasses.replace(states[k], local=tensor)
    return results


def _lay_out_round(
    partitioner: Partitioner,
    graph: Any,
    inputs: Values,
    states: Mapping[int, Value],
) -> tuple[Partitioner, list[Tensor], Values]:
    """Lay out the body of a loop, or its condition.

    Args:
        partitioner: the partitioner of the loop.
        graph: the function.
        inputs: the inputs of the loop.
        states: the loop variables at the start of any round.

    Returns:
        The partitioner of the function, its inputs that are loop variables,
        and its outputs.
    """
    inner = partitioner.for_function()
    values = []
    tensors: list[Tensor] = []
    for index, value in enumerate(inputs):
        if index not in states:
            values.append(_captured_value(partitioner, value))
            continue
        like, state = graph.inputs[index], states[index]
        shape = local_shape(like.shape, state.layout)
        tensors.append(Tensor(like.dtype, shape, on_towers=True))
        values.append(_loop_variable(state, tensors[-1], like.shape))
    return inner, tensors, inner.lay_out_function(graph, values)


def _loop_variable(
    state: Value, tensor: Tensor, shape: tf.TensorShape
) -> Value:
    """Return the value of a loop variable at the start of a round."""
    sizes = state.shape
    if shape.rank is not None:
        sizes = tuple(
            traced if size is UNKNOWN else size
            for size, traced in zip(
                sizes or (UNKNOWN,) * shape.rank, sizes_of(shape), strict=True
            )
        )
    if state.layout == REPLICATED:
        return dataclasses.replace(state, whole=tensor, shape=sizes)
    return dataclasses.replace(state, local=tensor, shape=sizes)
