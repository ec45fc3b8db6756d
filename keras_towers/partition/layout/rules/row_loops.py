"""Loops with a round for each row: a tower runs the rounds of its own rows.

``tf.map_fn`` has a round for each example. A tower runs those of its own
examples, with a list that is as long as they are many::

    round     one device             tower 0      tower 1
    0         reads, sets item 0     item 0
    1         reads, sets item 1     item 1
    2         reads, sets item 2                  item 0
    3         reads, sets item 3                  item 1

So a round must need no other one. What it may pass on is a list of which it
only uses the item of its row, and a sum to which it only adds.
``_CarriedState`` says what a round has done to either so far: it is an
automaton that a loop variable goes through, from the first operation of the
round to the last. Where it ends says what the variable is after the loop (the
rows of all towers, an empty list, or a partial sum); where it has no
transition, towers run all rounds.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.layouts import (
    PARTIAL,
    REPLICATED,
    DataDependentUnit,
    ListOf,
    Unit,
    is_row_per_element,
)
from keras_towers.partition.ir.program import Function, Tensor
from keras_towers.partition.ir.reasons import require, unless_none
from keras_towers.partition.ir.sizes import UNKNOWN, Size
from keras_towers.partition.ir.values import (
    Elements,
    Value,
    Values,
    common_facts,
)
from keras_towers.partition.layout.folding import constant
from keras_towers.partition.layout.layout_pass import (
    lay_out_function,
    lay_out_node,
)
from keras_towers.partition.layout.nodes import Node, Scope
from keras_towers.partition.layout.rules.control_flow import (
    add_loop,
    loop_variables,
    settle,
    skip_identities,
)


class _CarriedState(enum.Enum):
    """The state of a sum, or of the element of the row in a list.

    Attributes:
        SUM: a sum, which may only be added to.
        UNCHANGED: an element that may be read, set or popped.
        SET: the round has set the element.
        POPPED: the round has popped the element.
        NOT_PUSHED: the list is empty at first, and each round pushes an
            element.
        PUSHED: the round has pushed the element.
    """

    SUM = enum.auto()
    UNCHANGED = enum.auto()
    SET = enum.auto()
    POPPED = enum.auto()
    NOT_PUSHED = enum.auto()
    PUSHED = enum.auto()


_ADDS = ("Add", "AddV2", "AddN")
_ACCESSIBLE = (_CarriedState.UNCHANGED, _CarriedState.SET)
# By the type of an operation: the states that may be before it, and that after.
_TRANSITIONS = {
    **dict.fromkeys(_ADDS, ((_CarriedState.SUM,), _CarriedState.SUM)),
    "TensorListSetItem": (_ACCESSIBLE, _CarriedState.SET),
    "TensorListPopBack": (_ACCESSIBLE, _CarriedState.POPPED),
    "TensorListPushBack": ((_CarriedState.NOT_PUSHED,), _CarriedState.PUSHED),
}


class RowLoop:
    """A loop with one round for each row of a list.

    Args:
        node: the loop.
        body: the graph of a round.
        inputs: the inputs of the loop.

    Raises:
        NotDivided: no input, or several, is a list of rows.
    """

    def __init__(self, node: Node, body: tf.Graph, inputs: Values):
        layouts = {v.layout for v in inputs if isinstance(v.layout, ListOf)}
        units = {
            layout.element.unit: layout
            for layout in layouts
            if is_row_per_element(layout.element)
        }
        require(len(units) == 1)
        ((self._unit, self._layout),) = units.items()
        self._node, self._body, self._inputs = node, body, inputs
        self._loop_vars = loop_variables(body)
        self._counters = [k for k in self._loop_vars if self._is_counter(k)]
        # Rounds that pop from lists begin with the last row.
        types = {operation.type for operation in body.get_operations()}
        self._pops_lists = "TensorListPopBack" in types
        self._start_states = {k: self._state(k) for k in range(len(inputs))}

    def _is_counter(self, index: int) -> bool:
        """Whether an input starts at 0, and each round adds 1 to it."""
        update = skip_identities(self._body.outputs[index]).op
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

    def _state(self, index: int) -> _CarriedState | None:
        """Return the state of an input; None: a round may use it in any way."""
        value = self._inputs[index]
        if index not in self._loop_vars:
            return (
                _CarriedState.UNCHANGED
                if value.layout == self._layout
                else None
            )
        if index in self._counters and not self._pops_lists:
            return None
        if self._body.inputs[index].dtype != tf.variant:
            return _CarriedState.SUM
        elements = value.elements
        is_empty = elements is not None and elements.length == 0
        # Pushing while popping from another list would reverse the rows.
        if value.is_replicated and is_empty and not self._pops_lists:
            return _CarriedState.NOT_PUSHED
        return _CarriedState.UNCHANGED

    def lay_out(self, condition: tf.Graph) -> Values:
        """Add the loop; return the values of its outputs.

        Args:
            condition: the graph of the condition.

        Raises:
            NotDivided: the rounds do not correspond to rows, or a round needs
                more than its own row.
        """
        require(self._counters and self._is_bounded_by_rows(condition))
        builder, unit = self._node.builder, self._unit
        starts = [self._start(index) for index in range(len(self._inputs))]
        lists = {
            index: self._list_in_round(index, self._inputs[index])
            for index, state in self._start_states.items()
            if state in (_CarriedState.UNCHANGED, _CarriedState.NOT_PUSHED)
        }
        lay_out_round = functools.partial(self._lay_out_row, starts)
        (round_, tensors, ends), _ = settle(lists, lay_out_round)
        outputs = [
            round_.scope.converter.replicate(ends[index])
            for index in self._loop_vars
        ]
        # Every tower stops after the last of its rows.
        copies = [Tensor(t.dtype, t.shape, BATCH) for t in tensors]
        counter = copies[self._loop_vars.index(self._counters[0])]
        limit = builder.op("AddV2", [unit.start, unit.count], ())
        limit = builder.cast(limit, counter.dtype, is_repeated=False)
        test = Builder(can_exchange=False)
        continues = test.op("Less", [counter, limit], ())
        local_results = add_loop(
            self._node,
            [starts[index] for index in self._loop_vars],
            Function(tensors, outputs, round_.scope.builder.operations),
            Function(copies, [continues], test.operations),
        )
        results = list(self._inputs)
        own_results = local_results[: len(self._loop_vars)]
        for index, local in zip(self._loop_vars, own_results, strict=True):
            state, _ = round_.tracked.get(ends[index], (None, index))
            results[index] = self._result(index, state, local, ends[index])
        return results

    def _is_bounded_by_rows(self, condition: tf.Graph) -> bool:
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
            if limit is not None and limit not in self._loop_vars:
                known = self._inputs[limit].known
            elif operands[1].op.type == "Const":
                known = constant(operands[1].op)
            if counter not in self._counters:
                return False
            if not _is_known_to_be(known, self._unit.size):
                return False
        return True

    def _start(self, index: int) -> Tensor:
        """Return the local input of the loop."""
        value, dtype = self._inputs[index], self._body.inputs[index].dtype
        converter = self._node.converter
        if index in self._counters:
            start = self._unit.start
            return converter.builder.cast(start, dtype, is_repeated=False)
        if self._start_states[index] is _CarriedState.SUM:
            # Adding strings concatenates them, which depends on the order.
            require(dtype.is_floating or dtype.is_integer or dtype.is_complex)
            return converter.to_partial(value)
        if self._start_states[index] is _CarriedState.UNCHANGED:
            require(unless_none(value.elements).length == self._unit.size)
            return converter.to_layout(value, self._layout)
        return converter.replicate(value)

    def _lay_out_row(
        self, starts: Sequence[Tensor], lists: Mapping[int, Value]
    ) -> Any:
        """Lay out one round of the loop, for ``settle``.

        Args:
            starts: the local inputs of the loop.
            lists: the lists of rows at the start of any round.
        """
        round_ = _Round(self._node.scope, self._unit)
        tensors, values = [], []
        for index, tensor in enumerate(starts):
            given, state = self._inputs[index], self._start_states[index]
            if index in self._loop_vars:
                like = self._body.inputs[index]
                tensor = Tensor(like.dtype, like.shape, BATCH)
                tensors.append(tensor)
            value = Value(REPLICATED, whole=tensor, shape=given.shape)
            if index in lists:
                value = dataclasses.replace(lists[index], whole=tensor)
            elif index not in self._loop_vars:
                value.known, value.elements = given.known, given.elements
            elif state is None:
                round_.row_numbers.add(value)
            if state is not None:
                round_.tracked[value] = state, index
            values.append(value)
        ends = lay_out_function(round_.scope, self._body, values)
        require(not round_.scope.variables.contents)
        self._check(round_, values, ends)
        after = {
            k: self._list_in_round(k, common_facts(lists[k], ends[k]))
            for k in lists
        }
        return (round_, tensors, ends), after

    def _list_in_round(self, index: int, value: Value) -> Value:
        """Return the facts about a list that hold in every round."""
        length = self._unit.size
        is_popped = self._pops_lists and index in self._loop_vars
        if is_popped or self._start_states[index] is _CarriedState.NOT_PUSHED:
            length = UNKNOWN
        elements = dataclasses.replace(
            unless_none(value.elements), length=length
        )
        return Value(REPLICATED, shape=(), elements=elements)

    def _check(self, round_: _Round, values: Values, ends: Values) -> None:
        """Refuse rounds that access another row."""
        for index in {*self._loop_vars, *round_.popped}:
            before = self._start_states[index]
            if before is None:
                continue
            state, origin = round_.tracked.get(ends[index], (None, None))
            require(origin == index and state is not _CarriedState.NOT_PUSHED)
            require(index not in round_.popped or state is _CarriedState.POPPED)
            if state is _CarriedState.SUM:
                # The addition must not broadcast the sum.
                shape = values[index].sizes
                require(UNKNOWN not in shape and shape == ends[index].shape)

    def _result(
        self, index: int, state: _CarriedState | None, local: Tensor, end: Value
    ) -> Value:
        """Return the value of an output of the loop."""
        if index in self._counters:
            return _total_of(self._unit, self._node.builder, local.dtype)
        if state is _CarriedState.SUM:
            return Value(PARTIAL, local, shape=end.shape)
        elements = unless_none(end.elements)
        if state is _CarriedState.POPPED:
            # The list is empty, as on one device.
            empty = Elements(elements.dtype, elements.declared, 0)
            return Value(REPLICATED, local, shape=(), elements=empty)
        # Each round has set the element of its row.
        elements = dataclasses.replace(
            elements,
            length=self._unit.size,
            is_full=elements.is_full or state is _CarriedState.SET,
        )
        return Value(self._layout, local, elements=elements)


class _Round:
    """Lays out one round of a loop, the same on a tower as on one device.

    Args:
        outer: the scope of the loop.
        unit: the unit of the rows.

    Attributes:
        scope: the scope of the round.
        row_numbers: values that are the number of the round's row.
        tracked: the states of lists of rows and of sums, each with the index of
            the loop's input that it derives from; None: the round has made the
            list, which is zero except for the element of its row.
        popped: the indices of inputs from which the round has popped.
    """

    def __init__(self, outer: Scope, unit: Unit | DataDependentUnit):
        self.scope = outer.of_round(self._lay_out_node)
        self._unit = unit
        self.row_numbers: set[Value] = set()
        self.tracked: dict[Value, tuple[_CarriedState, int | None]] = {}
        self.popped: set[int] = set()
        self._length = outer.units.symbol_of(unit)

    def _lay_out_node(self, node: Node, inputs: list[Value]) -> Values:
        """Lay out an operation, and track lists of rows and sums.

        Raises:
            NotDivided: it accesses another row.
        """
        before = [self.tracked[v] for v in inputs if v in self.tracked]
        is_row_number = bool(inputs) and inputs[0] in self.row_numbers
        if node.type == "Identity" and (before or is_row_number):
            return inputs
        is_reserve = node.type == "TensorListReserve"
        if is_reserve and _is_known_to_be(inputs[1].known, self._length):
            return self._reserve_rows(node, inputs)
        if not before:
            return lay_out_node(node, inputs)
        if node.type == "TensorListLength":
            unit = self._unit
            require(unless_none(inputs[0].elements).length == unit.size)
            length = _total_of(unit, node.builder, node.output_dtype())
            length.known = np.asarray(self._length, object)
            return [length]
        after = self._state_after(node, inputs, before)
        operands = list(inputs)
        if node.type in ("TensorListGetItem", "TensorListSetItem"):
            operands[1] = self._local_index(inputs[1])
        outputs = lay_out_node(node, operands)
        elements = inputs[0].elements
        is_numbered = elements is not None and (
            elements.is_full and elements.are_row_numbers
        )
        if node.type == "TensorListPushBack" and inputs[1] in self.row_numbers:
            outputs[0].elements = unless_none(elements).with_item(
                inputs[1], True
            )
        elif node.type == "TensorListPopBack" and is_numbered:
            self.row_numbers.add(outputs[1])
        if after is not None:
            self.tracked[outputs[0]] = after
        return outputs

    def _state_after(
        self,
        node: Node,
        inputs: Values,
        before: Sequence[tuple[_CarriedState, int | None]],
    ) -> tuple[_CarriedState, int | None] | None:
        """Return the state of the output; None: the list is only read."""
        are_lists = all(state in _ACCESSIBLE for state, _ in before)
        if node.type == "AddN" and are_lists and len(before) == len(inputs):
            # The lists made in this round are zero in all other rows.
            origins = [origin for _, origin in before if origin is not None]
            require(len(origins) <= 1)
            return _CarriedState.UNCHANGED, origins[0] if origins else None
        require(len(before) == 1)
        ((state, origin),) = before
        may_be, then = _TRANSITIONS.get(node.type, ((), None))
        after = then if state in may_be else None
        # A list must be what is accessed, not an element of another list.
        require(after is _CarriedState.SUM or inputs[0] in self.tracked)
        if after is None:
            reads = node.type == "TensorListGetItem" and are_lists
            require(reads or node.type == "TensorListElementShape")
            return None
        if after is _CarriedState.POPPED:
            self.popped.add(unless_none(origin))
        return after, origin

    def _reserve_rows(self, node: Node, inputs: Values) -> Values:
        """Reserve a list of the tower's rows."""
        count = node.units.least_one(self._unit.count)
        count = node.builder.cast(count, tf.int32)
        length = Value(REPLICATED, whole=count, shape=())
        outputs = lay_out_node(node, [inputs[0], length])
        elements = outputs[0].elements
        if elements is not None:
            outputs[0].elements = dataclasses.replace(
                elements, length=self._unit.size
            )
        self.tracked[outputs[0]] = _CarriedState.UNCHANGED, None
        return outputs

    def _local_index(self, index: Value) -> Value:
        """Convert the number of the round's row to an index on the tower."""
        require(index in self.row_numbers)
        builder = self.scope.builder
        number = self.scope.converter.replicate(index)
        start = builder.cast(self._unit.start, number.dtype)
        local = builder.op("Sub", [number, start], ())
        return Value(REPLICATED, whole=local, shape=())


def _total_of(
    unit: Unit | DataDependentUnit, builder: Builder, dtype: tf.DType
) -> Value:
    """Return the global number of units."""
    whole = builder.cast(unit.total, dtype)
    known = np.asarray(unit.size, object)
    return Value(REPLICATED, whole=whole, shape=(), known=known)


def _is_known_to_be(known: np.ndarray | None, number: object) -> bool:
    """Whether the known entries are a single number, equal to this one."""
    if known is None or np.shape(known):
        return False
    entry = known[()]
    return isinstance(entry, (int, Size)) and bool(entry == number)
