"""Loops: a tower runs all rounds, or the rounds of its rows.

*All rounds*: a recurrent layer has a round for each time step. Every tower runs
all of them, each time with its rows of the loop variables::

    round     one device   tower 0     tower 1
    0, 1, 2   rows 0-3     rows 0, 1   rows 2, 3

Any round may depend on the one before it, so a loop variable must have the same
layout before and after a round. A few passes over the body find it.

*The rounds of its rows*: ``tf.map_fn`` has a round for each example, and a
tower runs those of its own examples (``row_loops.py``).

Nobody declares which way a loop is: the second is tried first. A loop that fits
neither is computed once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH
from keras_towers.partition.ir.layouts import REPLICATED, local_shape, sizes_of
from keras_towers.partition.ir.program import Function, Tensor
from keras_towers.partition.ir.reasons import NotDivided, require
from keras_towers.partition.ir.registry import operation
from keras_towers.partition.ir.sizes import UNKNOWN
from keras_towers.partition.ir.values import Value, Values, replicated
from keras_towers.partition.layout.layout_pass import lay_out_function
from keras_towers.partition.layout.nodes import Node, Scope
from keras_towers.partition.layout.rules.control_flow import (
    add_loop,
    called_graph,
    join_values,
    loop_variables,
    require_towers_differ,
    settle,
    try_with_partial_sums,
    uses_variables,
)
from keras_towers.partition.layout.rules.row_loops import RowLoop


def _loop(node: Node, *inputs: Value) -> Values:
    if not uses_variables(inputs):
        require_towers_differ(inputs)
    body = called_graph(node, node.attr("body").name)
    condition = called_graph(node, node.attr("cond").name)
    require(len(body.outputs) == len(inputs))
    with contextlib.suppress(NotDivided):
        return RowLoop(node, body, inputs).lay_out(condition)
    lay_out = functools.partial(_lay_out_loop, node, body, condition)
    return try_with_partial_sums(node, inputs, lay_out)


# A loop variable by its index, or a variable that rounds write, by its handle.
_Key: TypeAlias = int | Tensor


def _lay_out_loop(
    node: Node, body: tf.Graph, condition: tf.Graph, inputs: Values
) -> Values:
    """Lay out a loop so that every tower runs all its rounds.

    A value that rounds write to a variable is a loop variable, too. It is
    assigned to the variable after the loop.
    """
    converter, variables = node.converter, node.variables
    loop_vars = loop_variables(body)
    require(all(body.inputs[k].dtype != tf.resource for k in loop_vars))
    before = node.scope.computed_once.copy()
    starts: dict[_Key, Value] = {k: inputs[k] for k in loop_vars}

    def lay_out_round(states: Mapping[_Key, Value]) -> Any:
        # Only the last pass counts.
        node.scope.restore_computed_once(before)
        round_, tensors, outputs = _lay_out_round(node, body, inputs, states)
        ends: dict[_Key, Value] = {k: outputs[k] for k in loop_vars}
        for handle in round_.variables.contents:
            variable = Value(REPLICATED, whole=handle)
            if handle not in starts:
                content = variables.content_of(variable)
                starts[handle] = converter.gathered(content)
            ends[handle] = round_.variables.content_of(variable)
        after = {
            key: join_values(states.get(key, starts[key]), end)
            for key, end in ends.items()
        }
        return (round_, tensors, ends), after

    (round_, tensors, ends), states = settle(
        {key: join_values(value, value) for key, value in starts.items()},
        lay_out_round,
    )
    if node.builder.can_exchange and not uses_variables(inputs):
        require_towers_differ([*states.values()])
    operands, outputs = [], []
    for key, state in states.items():
        require(isinstance(key, int) or state.is_replicated)
        operands.append(converter.to_layout(starts[key], state.layout))
        outputs.append(round_.converter.to_layout(ends[key], state.layout))
    new_body = Function(tensors, outputs, round_.builder.operations)
    tester, tensors, (end,) = _lay_out_round(node, condition, inputs, states)
    continues = tester.converter.to_layout(end, REPLICATED)
    _require_no_writes(tester, dict(zip(states, tensors, strict=True)))
    new_condition = Function(tensors, [continues], tester.builder.operations)
    results = list(inputs)
    local_results = add_loop(node, operands, new_body, new_condition)
    for key, tensor in zip(states, local_results[: len(states)], strict=True):
        state = states[key]
        result = (
            replicated(tensor, state)
            if state.layout == REPLICATED
            else dataclasses.replace(state, local=tensor)
        )
        if isinstance(key, int):
            results[key] = result
        else:
            variables.assign(Value(REPLICATED, whole=key), result)
    return results


def _require_no_writes(tester: Scope, before: Mapping[_Key, Tensor]) -> None:
    """Refuse a loop condition that writes variables.

    A condition can return only a truth value.

    Args:
        tester: the scope of the condition.
        before: what it gets of loop variables, and of variables.
    """
    for handle, content in tester.variables.contents.items():
        require(handle in before)
        require(before[handle] in (content.whole, content.local))


def _lay_out_round(
    node: Node, graph: tf.Graph, inputs: Values, states: Mapping[_Key, Value]
) -> tuple[Scope, list[Tensor], Values]:
    """Lay out the body of a loop, or its condition.

    Args:
        node: the loop.
        graph: the function.
        inputs: the inputs of the loop.
        states: the loop variables, and what variables hold that rounds write,
            at the start of any round.

    Returns:
        The scope of the function, its inputs for these, and its outputs.
    """
    inner = node.scope.of_function()
    tensors: list[Tensor] = []
    values = [
        value if index in states else node.converter.captured(value)
        for index, value in enumerate(inputs)
    ]
    for key, state in states.items():
        dtype, traced = (
            (graph.inputs[key].dtype, graph.inputs[key].shape)
            if isinstance(key, int)
            else key.type_of_content
        )
        shape = local_shape(traced, state.layout)
        tensors.append(Tensor(dtype, shape, BATCH))
        value = _loop_variable(state, tensors[-1], traced)
        if isinstance(key, int):
            values[key] = value
        else:
            inner.variables.contents[key] = value
    return inner, tensors, lay_out_function(inner, graph, values)


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


operation("While StatelessWhile", _loop)
