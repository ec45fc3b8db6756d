"""Loops that go round once for each example, such as those of ``tf.map_fn``.

Each tower goes round for its own examples, and does in each round what one
device does in it. Nothing may go from one round to another but lists, of which
each round has one element, and sums, to which each round adds.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import Builder
from keras_towers.partition.called_functions import looped, source
from keras_towers.partition.folding import constant
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    ListOf,
    NotDivided,
    Sharded,
    Value,
    Values,
    require,
)
from keras_towers.partition.list_elements import (
    Elements,
    alike,
    are_rows,
    elements_of,
    in_common,
    list_on_tower,
    one_more,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.registry import Node
from keras_towers.partition.sizes import UNKNOWN, Size, symbol

_ADDS = ("Add", "AddV2", "AddN")
_PASSES = 4


class Use(enum.Enum):
    """What a round may do with what it is given, or has done with it.

    Attributes:
        ANY: anything, as all rounds are given the same.
        COUNT: anything: it is the number of the round, and of its row.
        SUM: add to it.
        LIST: get or set the element of the round's row.
        SET: it has set that.
        POPPED: it has taken that off the end.
        EMPTY: add the element of the round's row at the end.
        PUSHED: it has done so.
    """

    ANY = enum.auto()
    COUNT = enum.auto()
    SUM = enum.auto()
    LIST = enum.auto()
    SET = enum.auto()
    POPPED = enum.auto()
    EMPTY = enum.auto()
    PUSHED = enum.auto()


_LISTS = (Use.LIST, Use.SET)
# What becomes of a use by an operation.
_AFTER = {
    **{(adds, Use.SUM): Use.SUM for adds in _ADDS},
    **{("TensorListSetItem", use): Use.SET for use in _LISTS},
    **{("TensorListPopBack", use): Use.POPPED for use in _LISTS},
    ("TensorListPushBack", Use.EMPTY): Use.PUSHED,
}
# What may come of a use in a round.
_ENDS = {
    Use.SUM: (Use.SUM,),
    Use.LIST: (*_LISTS, Use.POPPED),
    Use.EMPTY: (Use.PUSHED,),
}


def over_rows(
    node: Node,
    body: Any,
    condition: Any,
    inputs: Values,
) -> Values:
    """Divide the rounds of a loop over rows.

    Args:
        partition: has the program around it.
        node: the loop.
        body: the graph of a round.
        condition: the graph of what says whether there is another.
        inputs: what it is given.

    Raises:
        NotDivided: if it is no such loop.
    """
    lists = {v.layout for v in inputs if isinstance(v.layout, ListOf)}
    layouts = [layout for layout in lists if are_rows(layout.element)]
    require(len(layouts) == 1)
    loop = _Loop(node.partition, node, body, inputs, layouts[0])
    require(loop.is_bounded(condition))
    return loop.lay_out()


class _Loop:
    """A loop that goes round once for each of the rows of a list.

    Args:
        partition: has the program around it.
        node: its operation.
        body: the graph of a round.
        inputs: what it is given.
        layout: how lists are laid out that have the rows.
    """

    def __init__(
        self,
        partition: Partitioner,
        node: Node,
        body: Any,
        inputs: Values,
        layout: ListOf,
    ):
        assert isinstance(layout.element, Sharded)
        self._partition = partition
        self._node = node
        self._body = body
        self._inputs = inputs
        self._layout = layout
        self._unit = layout.element.unit
        indices = range(len(inputs))
        gives = [source(tensor) for tensor in body.outputs]
        self._kept = {i for i in indices if gives[i] is body.inputs[i]}
        self._carried = [i for i in indices if i not in self._kept]
        self._counters = [i for i in indices if self._counts(i, gives[i].op)]
        # Rounds that take lists apart begin with the last row.
        types = {operation.type for operation in body.get_operations()}
        self._goes_back = "TensorListPopBack" in types
        self._uses = [self._use(index) for index in indices]

    def _counts(self, index: int, adding: Any) -> bool:
        """Whether it is 0 at first, and one more after each round."""
        if not _is(self._inputs[index].known, 0) or adding.type not in _ADDS:
            return False
        parts = [source(tensor) for tensor in adding.inputs]
        ones = [p for p in parts if p is not self._body.inputs[index]]
        return (
            len(parts) == 2
            and len(ones) == 1
            and ones[0].op.type == "Const"
            and _is(constant(ones[0].op), 1)
        )

    def _use(self, index: int) -> Use:
        """What rounds may do with an input."""
        value = self._inputs[index]
        if index in self._kept:
            return Use.LIST if value.layout == self._layout else Use.ANY
        if index in self._counters and not self._goes_back:
            return Use.COUNT
        if self._body.inputs[index].dtype != tf.variant:
            return Use.SUM
        elements = value.element
        is_empty = elements is not None and elements.length == 0
        # What is taken apart from its end would be put down backwards.
        if value.is_replicated and is_empty and not self._goes_back:
            return Use.EMPTY
        return Use.LIST

    def is_bounded(self, condition: Any) -> bool:
        """Whether it goes round as often as there are rows."""
        waiting = [source(condition.outputs[0])]
        places = {t.name: index for index, t in enumerate(condition.inputs)}
        while waiting:
            operation = waiting.pop().op
            ends = [source(tensor) for tensor in operation.inputs]
            if operation.type == "LogicalAnd":
                waiting += ends
                continue
            if operation.type != "Less":
                return False
            counter, end = (places.get(tensor.name) for tensor in ends)
            known = None
            if end in self._kept:
                known = self._inputs[end].known
            elif ends[1].op.type == "Const":
                known = constant(ends[1].op)
            if counter not in self._counters or not _is(known, self._unit.size):
                return False
        return True

    def lay_out(self) -> Values:
        """Add the loop; return the values of its outputs.

        Raises:
            NotDivided: if a round needs more than its own row.
        """
        require(self._counters)
        partition, unit = self._partition, self._unit
        starts = [self._start(index) for index in range(len(self._inputs))]
        round_, tensors, ends = self._settled(starts)
        outputs = [round_.replicated(ends[index]) for index in self._carried]
        # Each tower goes round for its own rows.
        asked = [Tensor(t.dtype, t.shape, on_towers=True) for t in tensors]
        counter = asked[self._carried.index(self._counters[0])]
        end = partition.op("AddV2", [unit.start, unit.count], ())
        last = partition.cast(end, counter.dtype, is_repeated=False)
        condition = Builder(meets=False)
        goes_on = condition.op("Less", [counter, last], ())
        found = looped(
            self._node,
            [starts[index] for index in self._carried],
            Function(tensors, outputs, round_.operations),
            Function(asked, [goes_on], condition.operations),
        )
        results = list(self._inputs)
        for index, local in zip(self._carried, found, strict=False):
            use, _ = round_.uses.get(ends[index], (Use.COUNT, index))
            results[index] = self._result(index, use, local, ends[index])
        return results

    def _start(self, index: int) -> Tensor:
        """What each tower gives to its loop."""
        value, dtype = self._inputs[index], self._body.inputs[index].dtype
        partition, use = self._partition, self._uses[index]
        if index in self._counters:
            return partition.cast(self._unit.start, dtype, is_repeated=False)
        if use in (Use.ANY, Use.EMPTY):
            return partition.replicated(value)
        if use is Use.SUM:
            # Texts are joined, in an order.
            require(dtype.is_floating or dtype.is_integer or dtype.is_complex)
            return partition.partial(value)
        require(elements_of(value).length == self._unit.size)
        return list_on_tower(partition, value, self._layout)

    def _settled(
        self, starts: Sequence[Tensor]
    ) -> tuple[_Round, list[Tensor], Values]:
        """A round, its own inputs, and the values of its outputs."""
        states = {
            index: self._in_rounds(index, value)
            for index, value in enumerate(self._inputs)
            if self._uses[index] in (Use.LIST, Use.EMPTY)
        }
        for _ in range(_PASSES):
            round_ = _Round(self._partition, self._unit)
            tensors, values = self._given(round_, starts, states)
            ends = round_.call(self._body, values)
            self._check(round_, values, ends)
            joined_states = {
                i: self._in_rounds(i, in_common(states[i], ends[i]))
                for i in states
            }
            if all(alike(states[i], joined_states[i]) for i in states):
                return round_, tensors, ends
            states = joined_states
        raise NotDivided

    def _in_rounds(self, index: int, value: Value) -> Value:
        """What is known of a list in any round."""
        is_fixed = index in self._kept or not self._goes_back
        is_fixed = is_fixed and self._uses[index] is Use.LIST
        length = self._unit.size if is_fixed else UNKNOWN
        elements = dataclasses.replace(elements_of(value), length=length)
        return Value(REPLICATED, shape=(), element=elements)

    def _given(
        self,
        round_: _Round,
        starts: Sequence[Tensor],
        states: Mapping[int, Value],
    ) -> tuple[list[Tensor], list[Value]]:
        """Return the tensors that a round carries, and all of its inputs."""
        tensors, values = [], []
        for index, tensor in enumerate(starts):
            given, use = self._inputs[index], self._uses[index]
            if index not in self._kept:
                like = self._body.inputs[index]
                tensor = Tensor(like.dtype, like.shape, on_towers=True)
                tensors.append(tensor)
            if index in states:
                value = dataclasses.replace(states[index], whole=tensor)
            else:
                value = Value(REPLICATED, whole=tensor, shape=given.shape)
            if use is Use.ANY:
                value.known, value.element = given.known, given.element
            elif use is Use.COUNT:
                round_.places.add(value)
            else:
                round_.uses[value] = use, index
            values.append(value)
        return tensors, values

    def _check(self, round_: _Round, values: Values, ends: Values) -> None:
        """Refuse rounds that need another one's row."""
        for index in {*self._carried, *round_.popped}:
            use = self._uses[index]
            if use is Use.COUNT:
                continue
            after, origin = round_.uses.get(ends[index], (None, None))
            require(origin == index and after in _ENDS[use])
            require(index not in round_.popped or after is Use.POPPED)
            if use is Use.SUM:
                # What is added is not to repeat the entries of a sum.
                shape = values[index].sizes
                require(UNKNOWN not in shape and shape == ends[index].shape)

    def _result(self, index: int, use: Use, local: Tensor, end: Value) -> Value:
        if index in self._counters:
            total = self._partition.cast(self._unit.total, local.dtype)
            known = np.asarray(self._unit.size, object)
            return Value(REPLICATED, whole=total, shape=(), known=known)
        if use is Use.SUM:
            return Value(PARTIAL, local, shape=end.shape)
        elements = elements_of(end)
        if use is Use.POPPED:
            # Nothing is left, as on one device.
            empty = Elements(elements.dtype, elements.declared, 0)
            return Value(REPLICATED, local, shape=(), element=empty)
        # Every round has set its own.
        elements = dataclasses.replace(
            elements,
            length=self._unit.size,
            is_full=elements.is_full or use is Use.SET,
        )
        return Value(self._layout, local, element=elements)


class _Round(Partitioner):
    """Lays out a round: it is the same for a tower as for one device.

    Args:
        partition: has the program around it.
        unit: the rows for which a tower goes round.

    Attributes:
        places: the numbers of the round's row.
        uses: of lists of which a tower has the elements of its rows, and of
            sums: their use after what was done with them, and which of the
            inputs they were; None: a list of zeros but for the row's own.
        popped: the inputs of which the last element was taken.
    """

    def __init__(self, partition: Partitioner, unit: Any):
        # Whatever a round makes belongs to one row: none of it has more.
        super().__init__(
            dataclasses.replace(partition.unit, size=symbol("none")),
            partition.is_first,
            partition.options,
            partition,
        )
        self.units, self.once = {}, []
        self._row = unit
        self.places: set[Value] = set()
        self.uses: dict[Value, tuple[Use, int | None]] = {}
        self.popped: set[int] = set()

    def _outputs(self, node: Node, inputs: list[Value]) -> Values:
        used = [self.uses[value] for value in inputs if value in self.uses]
        if node.type == "Identity" and (used or inputs[0] in self.places):
            return inputs
        reserves = node.type == "TensorListReserve"
        if reserves and _is(inputs[1].known, self._row.size):
            return self._zeros(node, inputs)
        if not used:
            return super()._outputs(node, inputs)
        if node.type == "TensorListLength":
            return [self._number_of_rows(node, inputs[0])]
        after = self._after(node, inputs, used)
        operands = list(inputs)
        if node.type in ("TensorListGetItem", "TensorListSetItem"):
            operands[1] = self._own_place(inputs[1])
        outputs = super()._outputs(node, operands)
        if node.type == "TensorListPushBack" and inputs[1] in self.places:
            outputs[0].element = one_more(inputs[0].element, inputs[1], True)
        if node.type == "TensorListPopBack":
            elements = inputs[0].element
            if elements and elements.is_full and elements.are_places:
                self.places.add(outputs[1])
        if after is not None:
            self.uses[outputs[0]] = after
        return outputs

    def _after(
        self, node: Node, inputs: Values, used: Sequence[tuple[Use, int | None]]
    ) -> tuple[Use, int | None] | None:
        """The use of a list or sum after an operation; None: it is only read.

        Raises:
            NotDivided: if a round may not do this.
        """
        are_lists = all(use in _LISTS for use, _ in used)
        if node.type == "AddN" and are_lists and len(used) == len(inputs):
            # All but one are zeros elsewhere.
            origins = [origin for _, origin in used if origin is not None]
            require(len(origins) <= 1)
            return Use.LIST, origins[0] if origins else None
        require(len(used) == 1)
        ((use, origin),) = used
        after = _AFTER.get((node.type, use))
        require(after is Use.SUM or inputs[0] in self.uses)
        if after is None:
            reads = node.type == "TensorListGetItem" and are_lists
            require(reads or node.type == "TensorListElementShape")
            return None
        if after is Use.POPPED:
            if origin is None:
                raise NotDivided
            self.popped.add(origin)
        return after, origin

    def _zeros(self, node: Node, inputs: Values) -> Values:
        """A list of as many elements as there are rows."""
        count = self.cast(self._row.count, tf.int32)
        length = Value(REPLICATED, whole=count, shape=())
        outputs = super()._outputs(node, [inputs[0], length])
        elements = outputs[0].element
        outputs[0].element = elements and dataclasses.replace(
            elements, length=self._row.size
        )
        self.uses[outputs[0]] = Use.LIST, None
        return outputs

    def _number_of_rows(self, node: Node, value: Value) -> Value:
        require(elements_of(value).length == self._row.size)
        whole = self.cast(self._row.total, node.output_dtype(0))
        known = np.asarray(self._row.size, object)
        return Value(REPLICATED, whole=whole, shape=(), known=known)

    def _own_place(self, place: Value) -> Value:
        """The place of a row among those of a tower."""
        require(place in self.places)
        number = self.replicated(place)
        start = self.cast(self._row.start, number.dtype)
        index = self.op("Sub", [number, start], ())
        return Value(REPLICATED, whole=index, shape=())


def _is(known: Any, number: Any) -> bool:
    """Whether a number is known, and it is this."""
    if known is None or np.shape(known):
        return False
    entry = known[()]
    return isinstance(entry, (int, Size)) and bool(entry == number)
