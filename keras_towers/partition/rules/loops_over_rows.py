"""Loops with one round for each row, as in ``tf.map_fn``.

Every tower runs the rounds of its rows. This is possible if all that a round
passes on to later rounds are lists, in which it accesses only the element of
its row, and sums, to which it only adds.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import Builder
from keras_towers.partition.called_functions import (
    add_loop,
    settle,
    skip_identities,
)
from keras_towers.partition.conversions import is_row_per_element
from keras_towers.partition.folding import constant
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Elements,
    ListOf,
    Sharded,
    Value,
    Values,
    common_facts,
    require,
    required,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.registry import Node
from keras_towers.partition.sizes import UNKNOWN, Size, symbol

_ADDS = ("Add", "AddV2", "AddN")


class Permission(enum.Enum):
    """The ways in which a round may use an input of the loop.

    Attributes:
        ANY: any use, as all rounds get the same value.
        ROW_NUMBER: any use: it is the index of the round, and of its row.
        ADD: it is a sum; add to it.
        ROW_ELEMENT: it is a list; get, set or pop the element of the row.
        PUSH: it is a list, empty at first; push the element of the row.
    """

    ANY = enum.auto()
    ROW_NUMBER = enum.auto()
    ADD = enum.auto()
    ROW_ELEMENT = enum.auto()
    PUSH = enum.auto()


class State(enum.Enum):
    """The state of a sum, or of the element of the row in a list."""

    SUM = enum.auto()
    UNCHANGED = enum.auto()
    SET = enum.auto()
    POPPED = enum.auto()
    NOT_PUSHED = enum.auto()
    PUSHED = enum.auto()


_AT_START = {
    Permission.ADD: State.SUM,
    Permission.ROW_ELEMENT: State.UNCHANGED,
    Permission.PUSH: State.NOT_PUSHED,
}
_AT_END = {
    Permission.ADD: (State.SUM,),
    Permission.ROW_ELEMENT: (State.UNCHANGED, State.SET, State.POPPED),
    Permission.PUSH: (State.PUSHED,),
}
_ACCESSIBLE = (State.UNCHANGED, State.SET)
# The state after an operation, by its type and the state before.
_TRANSITIONS = {
    **{(type_, State.SUM): State.SUM for type_ in _ADDS},
    **{("TensorListSetItem", state): State.SET for state in _ACCESSIBLE},
    **{("TensorListPopBack", state): State.POPPED for state in _ACCESSIBLE},
    ("TensorListPushBack", State.NOT_PUSHED): State.PUSHED,
}


def divide_rounds(
    node: Node, body: Any, condition: Any, inputs: Values
) -> Values:
    """Divide the rounds of a loop over rows.

    Args:
        node: the loop.
        body: the graph of a round.
        condition: the graph of the condition.
        inputs: the inputs of the loop.

    Raises:
        NotDivided: the rounds do not correspond to rows, or use other rows.
    """
    lists = {v.layout for v in inputs if isinstance(v.layout, ListOf)}
    layouts = [layout for layout in lists if is_row_per_element(layout.element)]
    require(len(layouts) == 1)
    loop = _RowLoop(node, body, inputs, layouts[0])
    require(loop.is_bounded_by_rows(condition))
    return loop.lay_out()


class _RowLoop:
    """A loop with one round for each row of a list.

    Args:
        node: the loop.
        body: the graph of a round.
        inputs: the inputs of the loop.
        layout: the layout of lists of rows.
    """

    def __init__(self, node: Node, body: Any, inputs: Values, layout: ListOf):
        assert isinstance(layout.element, Sharded)
        self._partitioner = node.partitioner
        self._node = node
        self._body = body
        self._inputs = inputs
        self._layout = layout
        self._unit = layout.element.unit
        indices = range(len(inputs))
        outputs = [skip_identities(tensor) for tensor in body.outputs]
        self._invariants = {i for i in indices if outputs[i] is body.inputs[i]}
        self._loop_vars = [i for i in indices if i not in self._invariants]
        self._counters = [
            i for i in indices if self._is_counter(i, outputs[i].op)
        ]
        # Rounds that pop from lists begin with the last row.
        types = {operation.type for operation in body.get_operations()}
        self._pops_lists = "TensorListPopBack" in types
        self._permissions = [self._permission(index) for index in indices]

    def _is_counter(self, index: int, update: Any) -> bool:
        """Whether an input starts at 0, and is incremented in each round."""
        start = self._inputs[index].known
        if not _is_known_to_be(start, 0) or update.type not in _ADDS:
            return False
        terms = [skip_identities(tensor) for tensor in update.inputs]
        steps = [t for t in terms if t is not self._body.inputs[index]]
        return (
            len(terms) == 2
            and len(steps) == 1
            and steps[0].op.type == "Const"
            and _is_known_to_be(constant(steps[0].op), 1)
        )

    def _permission(self, index: int) -> Permission:
        value = self._inputs[index]
        if index in self._invariants:
            is_list = value.layout == self._layout
            return Permission.ROW_ELEMENT if is_list else Permission.ANY
        if index in self._counters and not self._pops_lists:
            return Permission.ROW_NUMBER
        if self._body.inputs[index].dtype != tf.variant:
            return Permission.ADD
        elements = value.elements
        is_empty = elements is not None and elements.length == 0
        # Pushing while popping from another list would reverse the rows.
        if value.is_replicated and is_empty and not self._pops_lists:
            return Permission.PUSH
        return Permission.ROW_ELEMENT

    def is_bounded_by_rows(self, condition: Any) -> bool:
        """Whether the condition allows one round for each row."""
        waiting = [skip_identities(condition.outputs[0])]
        indices = {t.name: index for index, t in enumerate(condition.inputs)}
        while waiting:
            operation = waiting.pop().op
            operands = [skip_identities(t) for t in operation.inputs]
            if operation.type == "LogicalAnd":
                waiting += operands
                continue
            if operation.type != "Less":
                return False
            counter, limit = (indices.get(t.name) for t in operands)
            known = None
            if limit in self._invariants:
                known = self._inputs[limit].known
            elif operands[1].op.type == "Const":
                known = constant(operands[1].op)
            if counter not in self._counters:
                return False
            if not _is_known_to_be(known, self._unit.size):
                return False
        return True

    def lay_out(self) -> Values:
        """Add the loop; return the values of its outputs.

        Raises:
            NotDivided: a round needs more than its own row.
        """
        require(self._counters)
        partitioner, unit = self._partitioner, self._unit
        starts = [self._start(index) for index in range(len(self._inputs))]
        round_, tensors, ends = self._settled_round(starts)
        outputs = [round_.replicate(ends[index]) for index in self._loop_vars]
        # Every tower stops after the last of its rows.
        copies = [Tensor(t.dtype, t.shape, on_towers=True) for t in tensors]
        counter = copies[self._loop_vars.index(self._counters[0])]
        limit = partitioner.op("AddV2", [unit.start, unit.count], ())
        limit = partitioner.cast(limit, counter.dtype, is_repeated=False)
        condition = Builder(can_exchange=False)
        continues = condition.op("Less", [counter, limit], ())
        local_results = add_loop(
            self._node,
            [starts[index] for index in self._loop_vars],
            Function(tensors, outputs, round_.operations),
            Function(copies, [continues], condition.operations),
        )
        results = list(self._inputs)
        for index, local in zip(self._loop_vars, local_results, strict=False):
            state, _ = round_.states.get(ends[index], (None, index))
            results[index] = self._result(index, state, local, ends[index])
        return results

    def _start(self, index: int) -> Tensor:
        """Return the local input of the loop."""
        value, dtype = self._inputs[index], self._body.inputs[index].dtype
        partitioner = self._partitioner
        if index in self._counters:
            start = self._unit.start
            return partitioner.cast(start, dtype, is_repeated=False)
        match self._permissions[index]:
            case Permission.ANY | Permission.PUSH:
                return partitioner.replicate(value)
            case Permission.ADD:
                # Adding strings concatenates them, which depends on the order.
                require(
                    dtype.is_floating or dtype.is_integer or dtype.is_complex
                )
                return partitioner.to_partial(value)
        require(required(value.elements).length == self._unit.size)
        return partitioner.to_layout(value, self._layout)

    def _settled_round(
        self, starts: Sequence[Tensor]
    ) -> tuple[_RoundPartitioner, list[Tensor], Values]:
        """Return a round, its loop variables, and its outputs."""

        def lay_out_round(states: Mapping[int, Value]) -> Any:
            round_ = _RoundPartitioner(self._partitioner, self._unit)
            tensors, values = self._inputs_of_round(round_, starts, states)
            ends = round_.lay_out_function(self._body, values)
            self._check(round_, values, ends)
            after = {
                i: self._list_in_round(i, common_facts(states[i], ends[i]))
                for i in states
            }
            return (round_, tensors, ends), after

        is_list = (Permission.ROW_ELEMENT, Permission.PUSH)
        states = {
            index: self._list_in_round(index, value)
            for index, value in enumerate(self._inputs)
            if self._permissions[index] in is_list
        }
        result, _ = settle(states, lay_out_round)
        return result

    def _list_in_round(self, index: int, value: Value) -> Value:
        """Return the facts about a list that hold in any round."""
        has_length = index in self._invariants or not self._pops_lists
        is_pushed = self._permissions[index] is Permission.PUSH
        length = self._unit.size if has_length and not is_pushed else UNKNOWN
        elements = dataclasses.replace(required(value.elements), length=length)
        return Value(REPLICATED, shape=(), elements=elements)

    def _inputs_of_round(
        self,
        round_: _RoundPartitioner,
        starts: Sequence[Tensor],
        states: Mapping[int, Value],
    ) -> tuple[list[Tensor], list[Value]]:
        """Return the loop variables of a round, and all of its inputs."""
        tensors, values = [], []
        for index, tensor in enumerate(starts):
            given, permission = self._inputs[index], self._permissions[index]
            if index not in self._invariants:
                like = self._body.inputs[index]
                tensor = Tensor(like.dtype, like.shape, on_towers=True)
                tensors.append(tensor)
            if index in states:
                value = dataclasses.replace(states[index], whole=tensor)
            else:
                value = Value(REPLICATED, whole=tensor, shape=given.shape)
            if permission is Permission.ANY:
                value.known, value.elements = given.known, given.elements
            elif permission is Permission.ROW_NUMBER:
                round_.row_numbers.add(value)
            else:
                round_.states[value] = _AT_START[permission], index
            values.append(value)
        return tensors, values

    def _check(
        self, round_: _RoundPartitioner, values: Values, ends: Values
    ) -> None:
        """Refuse rounds that access another row."""
        for index in {*self._loop_vars, *round_.popped}:
            permission = self._permissions[index]
            if permission is Permission.ROW_NUMBER:
                continue
            state, origin = round_.states.get(ends[index], (None, None))
            require(origin == index and state in _AT_END[permission])
            require(index not in round_.popped or state is State.POPPED)
            if permission is Permission.ADD:
                # The addition must not broadcast the sum.
                shape = values[index].sizes
                require(UNKNOWN not in shape and shape == ends[index].shape)

    def _result(
        self, index: int, state: State | None, local: Tensor, end: Value
    ) -> Value:
        """Return the value of an output of the loop."""
        if index in self._counters:
            return _total_of(self._unit, self._partitioner, local.dtype)
        if state is State.SUM:
            return Value(PARTIAL, local, shape=end.shape)
        elements = required(end.elements)
        if state is State.POPPED:
            # The list is empty, as on one device.
            empty = Elements(elements.dtype, elements.declared, 0)
            return Value(REPLICATED, local, shape=(), elements=empty)
        # Each round has set the element of its row.
        elements = dataclasses.replace(
            elements,
            length=self._unit.size,
            is_full=elements.is_full or state is State.SET,
        )
        return Value(self._layout, local, elements=elements)


class _RoundPartitioner(Partitioner):
    """Lays out a round, which is the same on a tower as on one device.

    Args:
        around: the partitioner of the loop.
        unit: the unit of the rows.

    Attributes:
        row_numbers: values that are the number of the round's row.
        states: the states of lists of rows and of sums, each with the index of
            the loop's input that it derives from; None: the round has made the
            list, which is zero except for the element of its row.
        popped: the indices of inputs from which the round has popped.
    """

    def __init__(self, around: Partitioner, unit: Any):
        # All values of a round belong to a single row, so none is sharded.
        no_unit = dataclasses.replace(around.unit, size=symbol("none"))
        super().__init__(no_unit, around.is_first, around.options, around)
        self.units, self._unit_by_key, self.once = {}, {}, []
        self._row_unit = unit
        self.row_numbers: set[Value] = set()
        self.states: dict[Value, tuple[State, int | None]] = {}
        self.popped: set[int] = set()

    def lay_out_node(self, node: Node, inputs: list[Value]) -> Values:
        """Lay out an operation, and track lists of rows and sums.

        Raises:
            NotDivided: it accesses another row.
        """
        before = [self.states[v] for v in inputs if v in self.states]
        is_row_number = bool(inputs) and inputs[0] in self.row_numbers
        if node.type == "Identity" and (before or is_row_number):
            return inputs
        is_reserve = node.type == "TensorListReserve"
        if is_reserve and _is_known_to_be(inputs[1].known, self._row_unit.size):
            return self._reserve_rows(node, inputs)
        if not before:
            return super().lay_out_node(node, inputs)
        if node.type == "TensorListLength":
            unit = self._row_unit
            require(required(inputs[0].elements).length == unit.size)
            return [_total_of(unit, self, node.output_dtype())]
        after = self._state_after(node, inputs, before)
        operands = list(inputs)
        if node.type in ("TensorListGetItem", "TensorListSetItem"):
            operands[1] = self._local_index(inputs[1])
        outputs = super().lay_out_node(node, operands)
        if node.type == "TensorListPushBack" and inputs[1] in self.row_numbers:
            elements = inputs[0].elements
            outputs[0].elements = elements and elements.with_item(
                inputs[1], is_row_number=True
            )
        if node.type == "TensorListPopBack":
            elements = inputs[0].elements
            if elements and elements.is_full and elements.are_row_numbers:
                self.row_numbers.add(outputs[1])
        if after is not None:
            self.states[outputs[0]] = after
        return outputs

    def _state_after(
        self,
        node: Node,
        inputs: Values,
        before: Sequence[tuple[State, int | None]],
    ) -> tuple[State, int | None] | None:
        """Return the state of the output; None: a list is only read."""
        are_lists = all(state in _ACCESSIBLE for state, _ in before)
        if node.type == "AddN" and are_lists and len(before) == len(inputs):
            # The lists made in this round are zero in all other rows.
            origins = [origin for _, origin in before if origin is not None]
            require(len(origins) <= 1)
            return State.UNCHANGED, origins[0] if origins else None
        require(len(before) == 1)
        ((state, origin),) = before
        after = _TRANSITIONS.get((node.type, state))
        require(after is State.SUM or inputs[0] in self.states)
        if after is None:
            reads = node.type == "TensorListGetItem" and are_lists
            require(reads or node.type == "TensorListElementShape")
            return None
        if after is State.POPPED:
            self.popped.add(required(origin))
        return after, origin

    def _reserve_rows(self, node: Node, inputs: Values) -> Values:
        """Reserve a list of the tower's rows."""
        count = self.cast(self._row_unit.count, tf.int32)
        length = Value(REPLICATED, whole=count, shape=())
        outputs = super().lay_out_node(node, [inputs[0], length])
        elements = outputs[0].elements
        outputs[0].elements = elements and dataclasses.replace(
            elements, length=self._row_unit.size
        )
        self.states[outputs[0]] = State.UNCHANGED, None
        return outputs

    def _local_index(self, index: Value) -> Value:
        """Convert the number of the round's row to an index on the tower."""
        require(index in self.row_numbers)
        number = self.replicate(index)
        start = self.cast(self._row_unit.start, number.dtype)
        local = self.op("Sub", [number, start], ())
        return Value(REPLICATED, whole=local, shape=())


def _total_of(unit: Any, partitioner: Partitioner, dtype: Any) -> Value:
    """Return the global number of units."""
    whole = partitioner.cast(unit.total, dtype)
    known = np.asarray(unit.size, object)
    return Value(REPLICATED, whole=whole, shape=(), known=known)


def _is_known_to_be(known: Any, number: Any) -> bool:
    """Whether the entries are a single number, which is known to be this."""
    if known is None or np.shape(known):
        return False
    entry = known[()]
    return isinstance(entry, (int, Size)) and bool(entry == number)
