"""Loops whose rounds each tower does with what it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.builder import Builder, NeedsExchange
from keras_towers.partition.functions import (
    alike,
    called,
    captured,
    dtypes_of,
    graph_of,
    inside,
    joined,
    laid_out,
    source,
    summed,
)
from keras_towers.partition.layouts import (
    REPLICATED,
    Layout,
    Value,
)
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner, local_shape
from keras_towers.partition.program import Function, Operation, Tensor
from keras_towers.partition.registry import rule
from keras_towers.partition.rules.rounds import over_rows

# More rounds of the pass change nothing, or a loop cannot be followed.
_PASSES = 8


@rule("While", "StatelessWhile", always=True)
def _looped(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    divided = not all(value.is_replicated for value in inputs)
    if partition.builder.meets and not divided:
        return None
    body = graph_of(node, node.attr("body").name)
    condition = graph_of(node, node.attr("cond").name)
    if body is None or condition is None:
        return None
    if len(body.outputs) != len(inputs):
        return None
    found = over_rows(partition, node, body, condition, inputs)
    if found is not None:
        return found
    loop = _Loop(partition, node, body, condition)
    try:
        found = loop.laid_out(inputs)
    except NeedsExchange:
        if not any(value.is_partial for value in inputs):
            return None
        try:
            found = loop.laid_out([summed(partition, v) for v in inputs])
        except NeedsExchange:
            return None
    return found if loop.is_divided else None


class _Loop:
    """A loop that is laid out.

    Args:
        partition: has the program around it.
        node: its operation.
        body: the graph of a round.
        condition: the graph of what says whether there is another.

    Attributes:
        is_divided: whether towers do different things in it.
    """

    def __init__(
        self, partition: Partitioner, node: Node, body: Any, condition: Any
    ):
        self._partition = partition
        self._node = node
        self._body = body
        self._condition = condition
        self._once = len(partition.once)
        self.is_divided = False
        # Those that change from one round to the next.
        self._carried = [
            index
            for index, tensor in enumerate(body.outputs)
            if source(tensor) is not body.inputs[index]
        ]

    def laid_out(self, inputs: Sequence[Value]) -> list[Value]:
        """Add the loop; return the values of its outputs.

        Args:
            inputs: what it is given.

        Raises:
            NeedsExchange: if towers would have to meet in it.
        """
        if any(self._dtype(i) == tf.resource for i in self._carried):
            raise NeedsExchange
        states, rounds = self._settled(inputs)
        # What all towers would do alike is better done once.
        self.is_divided = not self._partition.builder.meets or any(
            state.layout != REPLICATED for state in states.values()
        )
        asked = self._pass(self._condition, inputs, states)
        asked.close([asked.ends[0]], [REPLICATED])
        captures = list(dict.fromkeys([*rounds.captures, *asked.captures]))
        given = [
            laid_out(self._partition, inputs[index], states[index].layout)
            for index in self._carried
        ]
        taken = [*rounds.inputs, *captures]
        functions = {
            "body": Function(
                taken, [*rounds.outputs, *captures], rounds.operations
            ),
            "cond": Function(
                [*asked.inputs, *captures], asked.outputs, asked.operations
            ),
        }
        every = [*given, *captures]
        found = called(
            self._partition,
            self._node,
            every,
            {"T": dtypes_of(every)},
            [
                (tensor.dtype, tensor.shape)
                for tensor in functions["body"].inputs
            ],
            functions,
        )
        results = list(inputs)
        for index, tensor in zip(self._carried, found, strict=False):
            results[index] = dataclasses.replace(states[index], local=tensor)
        return results

    def _dtype(self, index: int) -> Any:
        return self._body.inputs[index].dtype

    def _settled(
        self, inputs: Sequence[Value]
    ) -> tuple[dict[int, Value], _Inside]:
        """What is carried, as it is in every round, and the body of a round."""
        states = {
            index: joined(inputs[index], inputs[index])
            for index in self._carried
        }
        for _ in range(_PASSES):
            # What the last pass finds counts.
            del self._partition.once[self._once :]
            found = self._pass(self._body, inputs, states)
            settled = {
                index: joined(states[index], found.ends[index])
                for index in self._carried
            }
            if all(alike(states[i], settled[i]) for i in self._carried):
                ends = [found.ends[index] for index in self._carried]
                layouts = [state.layout for state in states.values()]
                found.close(ends, layouts)
                return states, found
            states = settled
        raise NeedsExchange

    def _pass(
        self, graph: Any, inputs: Sequence[Value], states: dict[int, Value]
    ) -> _Inside:
        partition = self._partition.inside(Builder(meets=False))
        tensors, given = self._given(inputs, states)
        return _Inside(partition, tensors, partition.call(graph, given))

    def _given(
        self, inputs: Sequence[Value], states: dict[int, Value]
    ) -> tuple[list[Tensor], list[Value]]:
        """What a function is given that is carried, and all of its inputs."""
        tensors, values = [], []
        for index, value in enumerate(inputs):
            if index not in states:
                values.append(inside(self._partition, value))
                continue
            state, like = states[index], self._body.inputs[index]
            shape = local_shape(like.shape, state.layout)
            tensor = Tensor(like.dtype, shape, on_towers=True)
            tensors.append(tensor)
            values.append(_of_round(state, tensor, like.shape))
        return tensors, values


@dataclasses.dataclass
class _Inside:
    """A function of a loop.

    Attributes:
        partition: lays it out.
        inputs: its inputs that are carried.
        ends: the values of its outputs.
        outputs: its outputs.
        operations: those that it needs.
        captures: what else it is given.
    """

    partition: Partitioner
    inputs: Sequence[Tensor]
    ends: Sequence[Value]
    outputs: Sequence[Tensor] = ()
    operations: Sequence[Operation] = ()
    captures: Sequence[Tensor] = ()

    def close(self, ends: Sequence[Value], layouts: Sequence[Layout]) -> None:
        """Say what it returns, and how that is laid out."""
        self.outputs = [
            laid_out(self.partition, value, layout)
            for value, layout in zip(ends, layouts, strict=True)
        ]
        self.operations, self.captures = captured(
            self.partition.builder, self.inputs, self.outputs
        )


def _of_round(state: Value, tensor: Tensor, shape: tf.TensorShape) -> Value:
    """What is carried, as a round finds it."""
    sizes = state.shape
    if shape.rank is not None:
        own = sizes or (None,) * shape.rank
        sizes = tuple(
            static if size is None else size
            for size, static in zip(own, shape, strict=True)
        )
    if state.layout == REPLICATED:
        return dataclasses.replace(state, whole=tensor, shape=sizes)
    return dataclasses.replace(state, local=tensor, shape=sizes)
