"""Loops that towers run, in one of two ways.

*All rounds*: a recurrent layer has a round for each time step. Every tower runs
all of them, each time with its rows of the loop variables::

    round     one device   tower 0     tower 1
    0, 1, 2   rows 0-3     rows 0, 1   rows 2, 3

Any round may follow from the one before, so a variable is laid out as it is
before and after a round, which takes a few passes over the body to settle.

*The rounds of its rows*: ``tf.map_fn`` has a round for each example. A tower
runs those of its own examples, with a list that is as long as they are many::

    round     one device             tower 0      tower 1
    0         reads, sets item 0     item 0
    1         reads, sets item 1     item 1
    2         reads, sets item 2                  item 0
    3         reads, sets item 3                  item 1

So a round must need no other one. What it may pass on is a list of which it
only uses the item of its row, and a sum to which it only adds. ``_State`` says
what a round has done to either so far: it is an automaton that a loop variable
goes through, from the first operation of the round to the last. Where it ends
says what the variable is after the loop (the rows of all towers, an empty list,
or a partial sum); where it has no transition, towers run all rounds.

Which way it is, nobody declares: the second is tried first. A loop that fits
neither is computed once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import Builder
from keras_towers.partition.conversions import is_row_per_element
from keras_towers.partition.folding import constant
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    DataDependentUnit,
    Elements,
    ListOf,
    NotDivided,
    Unit,
    Value,
    Values,
    common_facts,
    have_same_facts,
    local_shape,
    replicated,
    require,
    required,
    sizes_of,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.registry import Node, rule
from keras_towers.partition.resources import type_of_content
from keras_towers.partition.rules.control_flow import (
    add_call,
    bind_captures,
    called_graph,
    join_values,
    require_towers_differ,
    try_with_partial_sums,
    uses_variables,
)
from keras_towers.partition.sizes import UNKNOWN, Size, symbol

_K = TypeVar("_K")
# Enough passes for the layouts of a loop to settle.
_PASSES = 8


@rule("While", "StatelessWhile")
def _loop(node: Node, *inputs: Value) -> Values:
    if not uses_variables(inputs):
        require_towers_differ(inputs)
    body = called_graph(node, node.attr("body").name)
    condition = called_graph(node, node.attr("cond").name)
    require(len(body.outputs) == len(inputs))
    with contextlib.suppress(NotDivided):
        return _RowLoop(node, body, inputs).lay_out(condition)
    lay_out = functools.partial(_lay_out_loop, node, body, condition)
    return try_with_partial_sums(node, inputs, lay_out)


def _loop_variables(body: Any) -> list[int]:
    """Return the indices of the inputs that a round may change."""
    return [
        index
        for index, tensor in enumerate(body.outputs)
        if _skip_identities(tensor) is not body.inputs[index]
    ]


def _skip_identities(tensor: Any) -> Any:
    """Return the tensor that a chain of identities copies."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _settle(
    variables: Mapping[_K, Value],
    lay_out_round: Callable[[Mapping[_K, Value]], tuple[Any, Any]],
) -> tuple[Any, Mapping[_K, Value]]:
    """Find loop variables that are the same before and after a round.

    Args:
        variables: the initial loop variables, by their keys.
        lay_out_round: lays out a round; returns a result, and the loop
            variables joined with those after the round.

    Returns:
        The last result, and the loop variables.

    Raises:
        NotDivided: they do not settle.
    """
    for _ in range(_PASSES):
        result, after = lay_out_round(variables)
        if after.keys() == variables.keys() and all(
            have_same_facts(variables[k], after[k]) for k in variables
        ):
            return result, variables
        variables = after
    raise NotDivided


def _add_loop(
    node: Node,
    loop_vars: Sequence[Tensor],
    body: Function,
    condition: Function,
) -> list[Tensor]:
    """Add a loop; return its outputs, of which the first are loop variables.

    Args:
        node: the traced loop.
        loop_vars: the N initial loop variables.
        body: takes the loop variables, and returns new ones.
        condition: takes the loop variables; returns whether to continue.
    """
    (body, condition), captures = bind_captures([body, condition])
    body = dataclasses.replace(body, outputs=[*body.outputs, *captures])
    operands = [*loop_vars, *captures]
    return add_call(
        node,
        operands,
        {"T": [tensor.dtype for tensor in operands]},
        [(tensor.dtype, tensor.shape) for tensor in body.inputs],
        {"body": body, "cond": condition},
    )


# ---- all rounds --------------------------------------------------------------

# A loop variable by its index, or a variable that rounds write, by its handle.
_Key: TypeAlias = int | Tensor


def _lay_out_loop(
    node: Node, body: Any, condition: Any, inputs: Values
) -> Values:
    """Lay out a loop of which every tower runs all rounds.

    What rounds write to variables is a loop variable, too, which is assigned
    after the loop.
    """
    partitioner = node.partitioner
    loop_vars = _loop_variables(body)
    require(all(body.inputs[k].dtype != tf.resource for k in loop_vars))
    before = len(partitioner.computed_once)
    starts: dict[_Key, Value] = {k: inputs[k] for k in loop_vars}

    def lay_out_round(states: Mapping[_Key, Value]) -> Any:
        # Only the last pass counts.
        del partitioner.computed_once[before:]
        round_, tensors, outputs = _lay_out_round(
            partitioner, body, inputs, states
        )
        ends: dict[_Key, Value] = {k: outputs[k] for k in loop_vars}
        for handle in round_.resources.contents:
            variable = Value(REPLICATED, whole=handle)
            if handle not in starts:
                content = partitioner.content_of(variable)
                starts[handle] = partitioner.gathered(content)
            ends[handle] = round_.content_of(variable)
        after = {
            key: join_values(states.get(key, starts[key]), end)
            for key, end in ends.items()
        }
        return (round_, tensors, ends), after

    (round_, tensors, ends), states = _settle(
        {key: join_values(value, value) for key, value in starts.items()},
        lay_out_round,
    )
    if partitioner.can_exchange and not uses_variables(inputs):
        require_towers_differ([*states.values()])
    operands, outputs = [], []
    for key, state in states.items():
        require(isinstance(key, int) or state.is_replicated)
        operands.append(partitioner.to_layout(starts[key], state.layout))
        outputs.append(round_.to_layout(ends[key], state.layout))
    new_body = Function(tensors, outputs, round_.operations)
    tester, tensors, (end,) = _lay_out_round(
        partitioner, condition, inputs, states
    )
    continues = tester.to_layout(end, REPLICATED)
    _require_no_writes(tester, dict(zip(states, tensors, strict=True)))
    new_condition = Function(tensors, [continues], tester.operations)
    results = list(inputs)
    local_results = _add_loop(node, operands, new_body, new_condition)
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
            partitioner.assign(Value(REPLICATED, whole=key), result)
    return results


def _require_no_writes(
    tester: Partitioner, before: Mapping[_Key, Tensor]
) -> None:
    """Refuse a condition that writes variables: it returns no more than a bool.

    Args:
        tester: the partitioner of the condition.
        before: what it gets of loop variables, and of variables.
    """
    for handle, content in tester.resources.contents.items():
        require(handle in before)
        require(before[handle] in (content.whole, content.local))


def _lay_out_round(
    partitioner: Partitioner,
    graph: Any,
    inputs: Values,
    states: Mapping[_Key, Value],
) -> tuple[Partitioner, list[Tensor], Values]:
    """Lay out the body of a loop, or its condition.

    Args:
        partitioner: the partitioner of the loop.
        graph: the function.
        inputs: the inputs of the loop.
        states: the loop variables, and what variables hold that rounds write,
            at the start of any round.

    Returns:
        The partitioner of the function, its inputs for these, and its outputs.
    """
    inner = partitioner.for_function()
    tensors: list[Tensor] = []
    values = [
        value if index in states else partitioner.captured(value)
        for index, value in enumerate(inputs)
    ]
    for key, state in states.items():
        dtype, traced = (
            (graph.inputs[key].dtype, graph.inputs[key].shape)
            if isinstance(key, int)
            else type_of_content(key)
        )
        shape = local_shape(traced, state.layout)
        tensors.append(Tensor(dtype, shape, on_towers=True))
        value = _loop_variable(state, tensors[-1], traced)
        if isinstance(key, int):
            values[key] = value
        else:
            inner.resources.contents[key] = value
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


# ---- the rounds of a tower's rows --------------------------------------------


class _State(enum.Enum):
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
_ACCESSIBLE = (_State.UNCHANGED, _State.SET)
# The state after an operation, by its type and the state before.
_TRANSITIONS = {
    **{(type_, _State.SUM): _State.SUM for type_ in _ADDS},
    **{("TensorListSetItem", state): _State.SET for state in _ACCESSIBLE},
    **{("TensorListPopBack", state): _State.POPPED for state in _ACCESSIBLE},
    ("TensorListPushBack", _State.NOT_PUSHED): _State.PUSHED,
}


class _RowLoop:
    """A loop with one round for each row of a list.

    Args:
        node: the loop.
        body: the graph of a round.
        inputs: the inputs of the loop.

    Raises:
        NotDivided: no input, or several, is a list of rows.
    """

    def __init__(self, node: Node, body: Any, inputs: Values):
        layouts = {v.layout for v in inputs if isinstance(v.layout, ListOf)}
        units = {
            layout.element.unit: layout
            for layout in layouts
            if is_row_per_element(layout.element)
        }
        require(len(units) == 1)
        ((self._unit, self._layout),) = units.items()
        self._node, self._partitioner = node, node.partitioner
        self._body, self._inputs = body, inputs
        self._loop_vars = _loop_variables(body)
        self._counters = [k for k in self._loop_vars if self._is_counter(k)]
        # Rounds that pop from lists begin with the last row.
        types = {operation.type for operation in body.get_operations()}
        self._pops_lists = "TensorListPopBack" in types
        self._start_states = {k: self._state(k) for k in range(len(inputs))}

    def _is_counter(self, index: int) -> bool:
        """Whether an input starts at 0, and is incremented in each round."""
        update = _skip_identities(self._body.outputs[index]).op
        start = self._inputs[index].known
        if not _is_known_to_be(start, 0) or update.type not in _ADDS:
            return False
        terms = [_skip_identities(tensor) for tensor in update.inputs]
        steps = [t for t in terms if t is not self._body.inputs[index]]
        return (
            len(terms) == 2
            and len(steps) == 1
            and steps[0].op.type == "Const"
            and _is_known_to_be(constant(steps[0].op), 1)
        )

    def _state(self, index: int) -> _State | None:
        """Return the state of an input; None: a round may use it in any way."""
        value = self._inputs[index]
        if index not in self._loop_vars:
            return _State.UNCHANGED if value.layout == self._layout else None
        if index in self._counters and not self._pops_lists:
            return None
        if self._body.inputs[index].dtype != tf.variant:
            return _State.SUM
        elements = value.elements
        is_empty = elements is not None and elements.length == 0
        # Pushing while popping from another list would reverse the rows.
        if value.is_replicated and is_empty and not self._pops_lists:
            return _State.NOT_PUSHED
        return _State.UNCHANGED

    def lay_out(self, condition: Any) -> Values:
        """Add the loop; return the values of its outputs.

        Args:
            condition: the graph of the condition.

        Raises:
            NotDivided: the rounds do not correspond to rows, or a round needs
                more than its own row.
        """
        require(self._counters and self._is_bounded_by_rows(condition))
        partitioner, unit = self._partitioner, self._unit
        starts = [self._start(index) for index in range(len(self._inputs))]
        lists = {
            index: self._list_in_round(index, self._inputs[index])
            for index, state in self._start_states.items()
            if state in (_State.UNCHANGED, _State.NOT_PUSHED)
        }
        lay_out_round = functools.partial(self._lay_out_row, starts)
        (round_, tensors, ends), _ = _settle(lists, lay_out_round)
        outputs = [round_.replicate(ends[index]) for index in self._loop_vars]
        # Every tower stops after the last of its rows.
        copies = [Tensor(t.dtype, t.shape, on_towers=True) for t in tensors]
        counter = copies[self._loop_vars.index(self._counters[0])]
        limit = partitioner.op("AddV2", [unit.start, unit.count], ())
        limit = partitioner.cast(limit, counter.dtype, is_repeated=False)
        test = Builder(can_exchange=False)
        continues = test.op("Less", [counter, limit], ())
        local_results = _add_loop(
            self._node,
            [starts[index] for index in self._loop_vars],
            Function(tensors, outputs, round_.operations),
            Function(copies, [continues], test.operations),
        )
        results = list(self._inputs)
        own_results = local_results[: len(self._loop_vars)]
        for index, local in zip(self._loop_vars, own_results, strict=True):
            state, _ = round_.tracked.get(ends[index], (None, index))
            results[index] = self._result(index, state, local, ends[index])
        return results

    def _is_bounded_by_rows(self, condition: Any) -> bool:
        """Whether the condition allows one round for each row."""
        waiting = [_skip_identities(condition.outputs[0])]
        indices = {t.name: index for index, t in enumerate(condition.inputs)}
        while waiting:
            operation = waiting.pop().op
            operands = [_skip_identities(t) for t in operation.inputs]
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
        partitioner = self._partitioner
        if index in self._counters:
            start = self._unit.start
            return partitioner.cast(start, dtype, is_repeated=False)
        if self._start_states[index] is _State.SUM:
            # Adding strings concatenates them, which depends on the order.
            require(dtype.is_floating or dtype.is_integer or dtype.is_complex)
            return partitioner.to_partial(value)
        if self._start_states[index] is _State.UNCHANGED:
            require(required(value.elements).length == self._unit.size)
            return partitioner.to_layout(value, self._layout)
        return partitioner.replicate(value)

    def _lay_out_row(
        self, starts: Sequence[Tensor], lists: Mapping[int, Value]
    ) -> Any:
        """Lay out a round, for ``_settle``.

        Args:
            starts: the local inputs of the loop.
            lists: the lists of rows at the start of any round.
        """
        round_ = _RoundPartitioner(self._partitioner, self._unit)
        tensors, values = [], []
        for index, tensor in enumerate(starts):
            given, state = self._inputs[index], self._start_states[index]
            if index in self._loop_vars:
                like = self._body.inputs[index]
                tensor = Tensor(like.dtype, like.shape, on_towers=True)
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
        ends = round_.lay_out_function(self._body, values)
        require(not round_.resources.contents)
        self._check(round_, values, ends)
        after = {
            k: self._list_in_round(k, common_facts(lists[k], ends[k]))
            for k in lists
        }
        return (round_, tensors, ends), after

    def _list_in_round(self, index: int, value: Value) -> Value:
        """Return the facts about a list that hold in any round."""
        length = self._unit.size
        is_popped = self._pops_lists and index in self._loop_vars
        if is_popped or self._start_states[index] is _State.NOT_PUSHED:
            length = UNKNOWN
        elements = dataclasses.replace(required(value.elements), length=length)
        return Value(REPLICATED, shape=(), elements=elements)

    def _check(
        self, round_: _RoundPartitioner, values: Values, ends: Values
    ) -> None:
        """Refuse rounds that access another row."""
        for index in {*self._loop_vars, *round_.popped}:
            before = self._start_states[index]
            if before is None:
                continue
            state, origin = round_.tracked.get(ends[index], (None, None))
            require(origin == index and state is not _State.NOT_PUSHED)
            require(index not in round_.popped or state is _State.POPPED)
            if state is _State.SUM:
                # The addition must not broadcast the sum.
                shape = values[index].sizes
                require(UNKNOWN not in shape and shape == ends[index].shape)

    def _result(
        self, index: int, state: _State | None, local: Tensor, end: Value
    ) -> Value:
        """Return the value of an output of the loop."""
        if index in self._counters:
            return _total_of(self._unit, self._partitioner, local.dtype)
        if state is _State.SUM:
            return Value(PARTIAL, local, shape=end.shape)
        elements = required(end.elements)
        if state is _State.POPPED:
            # The list is empty, as on one device.
            empty = Elements(elements.dtype, elements.declared, 0)
            return Value(REPLICATED, local, shape=(), elements=empty)
        # Each round has set the element of its row.
        elements = dataclasses.replace(
            elements,
            length=self._unit.size,
            is_full=elements.is_full or state is _State.SET,
        )
        return Value(self._layout, local, elements=elements)


class _RoundPartitioner(Partitioner):
    """Lays out a round, which is the same on a tower as on one device.

    Args:
        outer: the partitioner of the loop.
        unit: the unit of the rows.

    Attributes:
        row_numbers: values that are the number of the round's row.
        tracked: the states of lists of rows and of sums, each with the index of
            the loop's input that it derives from; None: the round has made the
            list, which is zero except for the element of its row.
        popped: the indices of inputs from which the round has popped.
    """

    def __init__(self, outer: Partitioner, unit: Unit | DataDependentUnit):
        # All values of a round belong to a single row, so none is sharded, and
        # nothing in it is computed once for all towers.
        no_unit = dataclasses.replace(outer.unit, size=symbol("none"))
        super().__init__(
            no_unit, outer.is_first, outer.is_first_part, outer.options, outer
        )
        self.units, self._unit_by_key, self.computed_once = {}, {}, []
        self._row_unit = unit
        self.row_numbers: set[Value] = set()
        self.tracked: dict[Value, tuple[_State, int | None]] = {}
        self.popped: set[int] = set()

    def lay_out_node(self, node: Node, inputs: list[Value]) -> Values:
        """Lay out an operation, and track lists of rows and sums.

        Raises:
            NotDivided: it accesses another row.
        """
        before = [self.tracked[v] for v in inputs if v in self.tracked]
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
        elements = inputs[0].elements
        is_numbered = elements is not None and (
            elements.is_full and elements.are_row_numbers
        )
        if node.type == "TensorListPushBack" and inputs[1] in self.row_numbers:
            outputs[0].elements = required(elements).with_item(inputs[1], True)
        elif node.type == "TensorListPopBack" and is_numbered:
            self.row_numbers.add(outputs[1])
        if after is not None:
            self.tracked[outputs[0]] = after
        return outputs

    def _state_after(
        self,
        node: Node,
        inputs: Values,
        before: Sequence[tuple[_State, int | None]],
    ) -> tuple[_State, int | None] | None:
        """Return the state of the output; None: a list is only read."""
        are_lists = all(state in _ACCESSIBLE for state, _ in before)
        if node.type == "AddN" and are_lists and len(before) == len(inputs):
            # The lists made in this round are zero in all other rows.
            origins = [origin for _, origin in before if origin is not None]
            require(len(origins) <= 1)
            return _State.UNCHANGED, origins[0] if origins else None
        require(len(before) == 1)
        ((state, origin),) = before
        after = _TRANSITIONS.get((node.type, state))
        # A list must be what is accessed, not an element of another list.
        require(after is _State.SUM or inputs[0] in self.tracked)
        if after is None:
            reads = node.type == "TensorListGetItem" and are_lists
            require(reads or node.type == "TensorListElementShape")
            return None
        if after is _State.POPPED:
            self.popped.add(required(origin))
        return after, origin

    def _reserve_rows(self, node: Node, inputs: Values) -> Values:
        """Reserve a list of the tower's rows."""
        count = self.cast(self.least_one(self._row_unit.count), tf.int32)
        length = Value(REPLICATED, whole=count, shape=())
        outputs = super().lay_out_node(node, [inputs[0], length])
        elements = outputs[0].elements
        if elements is not None:
            outputs[0].elements = dataclasses.replace(
                elements, length=self._row_unit.size
            )
        self.tracked[outputs[0]] = _State.UNCHANGED, None
        return outputs

    def _local_index(self, index: Value) -> Value:
        """Convert the number of the round's row to an index on the tower."""
        require(index in self.row_numbers)
        number = self.replicate(index)
        start = self.cast(self._row_unit.start, number.dtype)
        local = self.op("Sub", [number, start], ())
        return Value(REPLICATED, whole=local, shape=())


def _total_of(
    unit: Unit | DataDependentUnit, partitioner: Partitioner, dtype: Any
) -> Value:
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
