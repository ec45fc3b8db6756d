"""Calls of functions, branches, and loops whose rounds each tower does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import attribute
from keras_towers.partition.called_functions import (
    Draft,
    called,
    closed,
    dtypes_of,
    graph_of,
    joined,
    looped,
    source,
    tensor_with_layout,
    value_in_function,
    with_parts_or_sums,
)
from keras_towers.partition.conversions import local_shape
from keras_towers.partition.layouts import (
    REPLICATED,
    NotDivided,
    Value,
    require,
)
from keras_towers.partition.list_elements import alike
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, rule
from keras_towers.partition.rules.loops_over_rows import over_rows
from keras_towers.partition.rules.means import lay_out_own_mean


@rule("PartitionedCall", "StatefulPartitionedCall")
def _called(partition: Partitioner, node: Node, *inputs: Value) -> list[Value]:
    """The operations of a function take the place of its call."""
    is_named = node.type.endswith("PartitionedCall")
    graph = graph_of(node, node.attr("f").name if is_named else node.type)
    means = lay_out_own_mean(partition, graph, inputs)
    if means is not None:
        return [means]
    # Gradients may have added outputs to the graph since it was called.
    return partition.call(graph, inputs)[: node.num_outputs]


@rule("If", "StatelessIf", "Case", "StatelessCase")
def _branched(
    partition: Partitioner, node: Node, chosen: Value, *inputs: Value
) -> list[Value]:
    graphs = [graph_of(node, name, ahead=1) for name in _names(node)]
    known = None if chosen.known is None else np.ravel(chosen.known)[0]
    if isinstance(known, (bool, int)) and chosen.shape == ():
        # The last branch is that of all other numbers.
        at = int(known) if 0 <= known < len(graphs) else -1
        return partition.call(graphs[at], inputs)[: node.num_outputs]
    _require_worth(partition, [chosen, *inputs])
    return with_parts_or_sums(
        partition,
        inputs,
        functools.partial(_lay_out_branches, partition, node, graphs, chosen),
    )


def _require_worth(partition: Partitioner, values: Sequence[Value]) -> None:
    """Have what all towers would do alike be done once."""
    is_alike = all(value.is_replicated for value in values)
    require(not (partition.builder.meets and is_alike))


def _names(node: Node) -> list[str]:
    if node.type.endswith("Case"):
        return [branch.name for branch in node.attr("branches")]
    return [node.attr(f"{name}_branch").name for name in ("else", "then")]


def _lay_out_branches(
    partition: Partitioner,
    node: Node,
    graphs: Sequence[Any],
    chosen: Value,
    inputs: Sequence[Value],
) -> list[Value]:
    # All towers go the same way.
    way = partition.replicated(chosen)
    branches = [partition.for_function() for _ in graphs]
    ends = []
    for branch, graph in zip(branches, graphs, strict=True):
        values = [value_in_function(partition, value) for value in inputs]
        ends.append(branch.call(graph, values)[: node.num_outputs])
    results = [
        functools.reduce(joined, values, values[0])
        for values in zip(*ends, strict=True)
    ]
    _require_worth(partition, results)
    layouts = [result.layout for result in results]
    drafts = []
    for branch, values in zip(branches, ends, strict=True):
        outputs = [
            tensor_with_layout(branch, value, layout)
            for value, layout in zip(values, layouts, strict=True)
        ]
        drafts.append(Draft(branch.builder, (), outputs))
    made, captures = closed(drafts)
    dtypes = dtypes_of(node.operation.outputs)
    attributes = {"Tin": dtypes_of(captures), "Tout": dtypes}
    functions: dict[str, Any] = {"branches": made}
    if not node.type.endswith("Case"):
        functions = {"else_branch": made[0], "then_branch": made[1]}
        attributes["Tcond"] = attribute(way.dtype)
    specs = [
        (tensor.dtype, local_shape(tensor.shape, layout))
        for tensor, layout in zip(node.operation.outputs, layouts, strict=True)
    ]
    tensors = called(
        partition, node, [way, *captures], attributes, specs, functions
    )
    for result, tensor in zip(results, tensors, strict=True):
        result.local = tensor
    return results


# ---- loops -------------------------------------------------------------------

# More rounds of the pass change nothing, or a loop cannot be followed.
_PASSES = 8
# What lays out a function, its own inputs, and the values of its outputs.
_Pass: TypeAlias = "tuple[Partitioner, list[Tensor], list[Value]]"


@rule("While", "StatelessWhile")
def _looped(partition: Partitioner, node: Node, *inputs: Value) -> list[Value]:
    _require_worth(partition, inputs)
    body = graph_of(node, node.attr("body").name)
    condition = graph_of(node, node.attr("cond").name)
    require(len(body.outputs) == len(inputs))
    with contextlib.suppress(NotDivided):
        return over_rows(partition, node, body, condition, inputs)
    loop = _Loop(partition, node, body, condition)
    return with_parts_or_sums(partition, inputs, loop.lay_out)


class _Loop:
    """A loop that is laid out.

    Args:
        partition: has the program around it.
        node: its operation.
        body: the graph of a round.
        condition: the graph of what says whether there is another.
    """

    def __init__(
        self, partition: Partitioner, node: Node, body: Any, condition: Any
    ):
        self._partition = partition
        self._node = node
        self._body = body
        self._condition = condition
        # Those that change from one round to the next.
        self._carried = [
            index
            for index, tensor in enumerate(body.outputs)
            if source(tensor) is not body.inputs[index]
        ]

    def lay_out(self, inputs: Sequence[Value]) -> list[Value]:
        """Add the loop; return the values of its outputs.

        Args:
            inputs: what it is given.

        Raises:
            NotDivided: if towers would have to meet in it, or all would do the
                same.
        """
        partition = self._partition
        dtypes = {self._body.inputs[index].dtype for index in self._carried}
        require(tf.resource not in dtypes)
        states, (inner, tensors, ends) = self._settled(inputs)
        layouts = {index: state.layout for index, state in states.items()}
        _require_worth(partition, [*states.values()])
        operands = [
            tensor_with_layout(partition, inputs[i], layouts[i])
            for i in layouts
        ]
        outputs = [
            tensor_with_layout(inner, ends[i], layouts[i]) for i in layouts
        ]
        body = Draft(inner.builder, tensors, outputs)
        inner, tensors, ends = self._pass(self._condition, inputs, states)
        goes_on = tensor_with_layout(inner, ends[0], REPLICATED)
        condition = Draft(inner.builder, tensors, [goes_on])
        locals_ = looped(partition, self._node, operands, body, condition)
        results = list(inputs)
        for index, tensor in zip(states, locals_, strict=False):
            results[index] = dataclasses.replace(states[index], local=tensor)
        return results

    def _settled(
        self, inputs: Sequence[Value]
    ) -> tuple[dict[int, Value], _Pass]:
        """What is carried, as it is in every round, and the last pass."""
        states = {i: joined(inputs[i], inputs[i]) for i in self._carried}
        before = len(self._partition.once)
        for _ in range(_PASSES):
            # What is computed once in the last pass counts.
            del self._partition.once[before:]
            last = self._pass(self._body, inputs, states)
            ends = last[2]
            joined_states = {
                i: joined(states[i], ends[i]) for i in self._carried
            }
            if all(alike(states[i], joined_states[i]) for i in self._carried):
                return states, last
            states = joined_states
        raise NotDivided

    def _pass(
        self, graph: Any, inputs: Sequence[Value], states: dict[int, Value]
    ) -> _Pass:
        """Lay out a function."""
        inner = self._partition.for_function()
        values = [
            states[index]
            if index in states
            else value_in_function(self._partition, value)
            for index, value in enumerate(inputs)
        ]
        tensors = []
        for index, state in states.items():
            like = self._body.inputs[index]
            shape = local_shape(like.shape, state.layout)
            tensors.append(Tensor(like.dtype, shape, on_towers=True))
            values[index] = _value_in_round(state, tensors[-1], like.shape)
        return inner, tensors, inner.call(graph, values)


def _value_in_round(
    state: Value, tensor: Tensor, shape: tf.TensorShape
) -> Value:
    """What is carried, as a round finds it."""
    sizes = state.shape
    if shape.rank is not None:
        sizes = tuple(
            static if size is None else size
            for size, static in zip(
                sizes or (None,) * shape.rank, shape, strict=True
            )
        )
    if state.layout == REPLICATED:
        return dataclasses.replace(state, whole=tensor, shape=sizes)
    return dataclasses.replace(state, local=tensor, shape=sizes)
