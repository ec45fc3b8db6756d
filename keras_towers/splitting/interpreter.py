"""One pass over the operations of a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from keras_towers import compat
from keras_towers.partition.sizes import Size, own
from keras_towers.splitting import (
    control_flow,
    marks,
    places,
    sparse,
    variables,
)
from keras_towers.splitting.completing import (
    clamped,
    completed,
    constant,
    folded,
)
from keras_towers.splitting.nodes import Layouts, Node
from keras_towers.splitting.rules import RULES, SIZES, effects
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Value,
    of_known,
    other,
    same,
)

# What they return follows from the shape of what is not known, if at all.
_OF_SHAPES = {
    *("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"),
    *("TensorListElementShape", "TensorListLength"),
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers of a step.

    Attributes:
        operation: what draws them.
        value: what they are: rows of examples, or the same for all.
        stateful: whether it keeps its own state, so that every tower draws
            others.
    """

    operation: Any
    value: Value
    stateful: bool


@dataclasses.dataclass(frozen=True)
class Effect:
    """What an operation of a step does besides computing.

    Attributes:
        operation: the operation.
        text: what it does: "PrintV2 happens once for every tower".
        at: the operation of the step that does it: this one, or one that calls
            a function.
        is_alike: whether it would do the same on all towers.
    """

    operation: Any
    text: str
    at: Any
    is_alike: bool


# They may be told the round of a loop over the examples.
_BY_ROUND = {
    *("Identity", "IdentityN", "TensorListGetItem", "TensorListSetItem"),
    *("TensorListPushBack", "TensorListPopBack", *control_flow.SPECIAL),
}


def _only_numbers(value: Value) -> bool:
    return value.reason is not None and value.reason.of_numbers


def _is_alike(value: Value) -> bool:
    """Whether all towers give the same, be it a handle."""
    return value.kind is Kind.HANDLE or value.is_same and not value.grows


class Interpreter:
    """Finds out what every tensor of a graph is.

    Args:
        initial: what variables hold at first, by the keys of their handles.

    Attributes:
        state: what variables hold now, by the keys of their handles.
        written: the operations that wrote them last.
        draws: the random numbers of the step.
        effects: what it does besides, by the operations of the step.
        unknown: types of operations without a rule.
        layouts: the orders of rows of random numbers.
        in_rounds: whether it is inside of a loop over the examples.
    """

    def __init__(self, initial: Mapping[Any, Value]):
        self.initial = initial
        self.state: dict[Any, Value] = {}
        self.written: dict[Any, Any] = {}
        self.draws: dict[Any, Draw] = {}
        self.effects: dict[Any, list[Effect]] = {}
        self._at: Any = None
        self.unknown: set[str] = set()
        self.layouts = Layouts()
        self.count = 0
        # Tells what a tensor is in one run of its graph from another.
        self._frame: Any = None
        self._units: dict[Any, Size] = {}
        self.in_rounds = False

    def run(self, graph: Any, inputs: Sequence[Value]) -> dict[str, Value]:
        """Return what the tensors of a graph are, by their names."""
        values = {
            tensor.name: value
            for tensor, value in zip(graph.inputs, inputs, strict=True)
        }
        outermost, before = self._at is None, self._frame
        self._frame = object()
        for operation in in_order(graph.get_operations(), values):
            self.count += 1
            if outermost:
                self._at = operation
            outputs: Sequence[Value] = self.outputs_of(operation, values)
            if outermost and operation in self.effects:
                outputs = self._of_effects(operation, values, outputs)
            for tensor, value in zip(operation.outputs, outputs, strict=True):
                values.setdefault(tensor.name, value)
        self._frame = before
        return values

    def _of_effects(
        self,
        operation: Any,
        values: Mapping[str, Value],
        outputs: Sequence[Value],
    ) -> Sequence[Value]:
        """Return the outputs of an operation of the step with effects.

        It may happen once, if all towers would give it the same.
        """
        effects = self.effects[operation]
        alike = all(_is_alike(values[t.name]) for t in operation.inputs)
        if not alike or not all(effect.is_alike for effect in effects):
            replace = dataclasses.replace
            effects[:] = [replace(effect, is_alike=False) for effect in effects]
            return outputs
        return [
            same(shape=tuple(tensor.shape))
            if tensor.shape.is_fully_defined()
            else value
            for tensor, value in zip(operation.outputs, outputs, strict=True)
        ]

    def call(self, graph: Any, inputs: Sequence[Value]) -> list[Value]:
        """Return what the outputs of a graph are."""
        values = self.run(graph, inputs)
        return [values[tensor.name] for tensor in graph.outputs]

    def outputs_of(
        self, operation: Any, values: Mapping[str, Value]
    ) -> list[Value]:
        """Return what an operation returns, of inputs that are known."""
        node = Node(operation, self.layouts)
        if not node.num_outputs and not node.num_inputs:
            return []
        if node.type == "Const":
            return [constant(operation)]
        if node.type == "Placeholder":
            return [other("uses an unknown input", operation, is_open=True)]
        given = [values[tensor.name] for tensor in operation.inputs]
        if node.type not in _BY_ROUND:
            number = other("numbers the examples of the batch")
            given = [number if v.kind is Kind.ROUND else v for v in given]
        try:
            outputs = self.applied(node, given, values)
        except DoesNotSplit as error:
            lost = other(str(error), operation, error.is_open)
            outputs = [lost] * node.num_outputs
        outputs = [
            completed(node, index, self._in_round(node, index, v, given), given)
            for index, v in enumerate(outputs[: node.num_outputs])
        ]
        return places.bounded(node, given, outputs)

    def applied(
        self, node: Node, given: list[Value], values: Mapping[str, Value]
    ) -> list[Value]:
        """Return what an operation returns, before it is completed."""
        found = places.followed(self, node, given, values)
        result = self._apply(node, given) if found is None else found
        if isinstance(result, Sequence):
            return list(result)
        return [result] * node.num_outputs

    def unit(self, what: str, tensor: Any) -> Size:
        """Return how many entries examples have by what a tensor holds."""
        key = (what, self._frame, tensor.graph, tensor.name)
        return self._units.setdefault(key, own(str(len(self._units))))

    def _in_round(
        self, node: Node, index: int, value: Value, given: Sequence[Value]
    ) -> Value:
        """Check that what follows from the example of a round is known to."""
        if node.type in control_flow.SPECIAL or node.type in _OF_SHAPES:
            return value
        if value.kind not in (Kind.SAME, Kind.ROWS, Kind.SUM):
            return value
        own = value.rows is not None and value.rows.axis < 0
        if not self.in_rounds:
            if own and node.output_dtype(index).name != "variant":
                return other("picks one example of the batch")
            return value
        if own or not any(v.rows and v.rows.axis < 0 for v in given):
            return value
        text = f"takes {node.type} in a loop over the examples"
        return other(text, is_open=True)

    def _apply(self, node: Node, given: list[Value]) -> Value | Sequence[Value]:
        special = _SPECIAL.get(node.type)
        if special is not None:
            return special(self, node, given)
        results = folded(node, given)
        if results is not None:
            return results
        if node.is_equal_to_itself:
            return of_known(True)
        limit = clamped(node, given)
        if limit is not None:
            return limit
        sizes = SIZES.get(node.type, ())
        rule = RULES.get(node.type)
        if rule is None:
            called = compat.graph_of_function(node.operation.graph, node.type)
            if called is not None:
                return self.call(called, given)
        # What only numbers examples says less than what takes their values.
        order = sorted(range(len(given)), key=lambda k: _only_numbers(given[k]))
        for index in order:
            value = given[index]
            if value.kind is not Kind.OTHER:
                continue
            if node.type in _OF_SHAPES and value.shape is not None:
                continue
            if node.type == "Assert":
                continue
            if index not in sizes or value.known is None:
                if rule is None and node.is_stateful:
                    return self.unknown_outputs(node, given)
                return [value.with_()] * node.num_outputs
        if rule is not None:
            if any(v.kind is Kind.HANDLE for v in given):
                return self.unknown_outputs(node, given)
            return rule(node, *given)
        return self.unknown_outputs(node, given)

    def unknown_outputs(
        self, node: Node, given: list[Value]
    ) -> Sequence[Value]:
        """What has no rule does the same everywhere, or nobody knows what."""
        count = node.num_outputs
        if node.is_stateful:
            text = f"{node.type} happens once for every tower"
            alike = all(map(_is_alike, given))
            effect = Effect(node.operation, text, self._at, alike)
            self.effects.setdefault(self._at, []).append(effect)
            returned = f"uses what {node.type} returns"
            return [other(returned, node.operation, is_open=alike)] * count
        if all(v.is_same and not v.grows for v in given):
            return [same()] * count
        self.unknown.add(node.type)
        text = f"does what is not known: {node.type}"
        return [other(text, node.operation, is_open=True)] * count

    def draw(self, node: Node, given: list[Value]) -> Value:
        """Note random numbers, and return what they are."""
        stateful = node.type in effects.STATEFUL_DRAWS
        rest = given[1:]
        try:
            if any(not v.is_same and v.kind is not Kind.HANDLE for v in rest):
                raise DoesNotSplit(
                    "draws random numbers by what follows from the batch"
                )
            if self.in_rounds and stateful:
                raise DoesNotSplit("draws random numbers for each example")
            value = effects.drawn(node, given[0])
        except DoesNotSplit as error:
            value = other(str(error), node.operation)
            if given[0].known is not None:
                value = value.with_(shape=tuple(given[0].known.flat))
        self.draws[node.operation] = Draw(node.operation, value, stateful)
        return value


Special: TypeAlias = (
    "Callable[[Interpreter, Node, list[Value]], Value | Sequence[Value]]"
)
_SPECIAL: dict[str, Special] = {
    **control_flow.SPECIAL,
    **variables.SPECIAL,
    **marks.SPECIAL,
    **sparse.SPECIAL,
    # Each output is one of the inputs, whatever the others are.
    "IdentityN": lambda interpreter, node, given: given,
    **dict.fromkeys(
        (*effects.STATELESS_DRAWS, *effects.STATEFUL_DRAWS), Interpreter.draw
    ),
}


def in_order(
    operations: Sequence[Any], known: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield operations, each after those whose outputs it takes.

    The bodies of loops are not always built in this order.
    """
    done: set[str] = set()
    for operation in operations:
        waiting = [operation]
        while waiting:
            last = waiting[-1]
            if last.name in done:
                waiting.pop()
                continue
            ahead = [
                tensor.op
                for tensor in last.inputs
                if tensor.op.name not in done and tensor.name not in known
            ]
            if ahead:
                waiting += ahead
                continue
            done.add(waiting.pop().name)
            yield last
