"""Loops that go round once for each example, such as those of ``tf.map_fn``.

Each tower goes round for its own examples, and does in each round what one
device does in it. Nothing may go from one round to another but lists, of which
each round has one element, and sums, to which each round adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import Builder, NeedsExchange
from keras_towers.partition.folding import constant
from keras_towers.partition.functions import (
    alike,
    called,
    captured,
    dtypes_of,
    inside,
    joined,
    source,
)
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    ListOf,
    Sharded,
    Value,
)
from keras_towers.partition.lists import own_list
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.sizes import symbol

_SHAPES = ("TensorListLength", "TensorListElementShape")
# What a loop may do with a list, by what it hands to the next round.
_USES = {
    "TensorListSetItem": ("TensorListGetItem", "TensorListSetItem", *_SHAPES),
    "TensorListPushBack": ("TensorListPushBack", *_SHAPES),
    "TensorListPopBack": ("TensorListPopBack", *_SHAPES),
    # A list of zeros but for the element of the round.
    "AddN": ("AddN",),
    "": ("TensorListGetItem", *_SHAPES),
}
_PASSES = 4


def over_rows(
    partition: Partitioner,
    node: Node,
    body: Any,
    condition: Any,
    inputs: Sequence[Value],
) -> list[Value] | None:
    """Divide the rounds of a loop over rows; None: it is no such loop.

    Args:
        partition: has the program around it.
        node: the loop.
        body: the graph of a round.
        condition: the graph of what says whether there is another.
        inputs: what it is given.
    """
    layouts = {
        value.layout.element
        for value in inputs
        if isinstance(value.layout, ListOf)
        and isinstance(value.layout.element, Sharded)
        and value.layout.element.axis < 0
    }
    if len(layouts) != 1:
        return None
    loop = _Rounds(partition, node, body, inputs, layouts.pop())
    if not loop.is_bounded(condition):
        return None
    partition.note_graph(body)
    return loop.laid_out()


class _Rounds:
    """A loop that goes round once for each of the rows of a list.

    Args:
        partition: has the program around it.
        node: its operation.
        body: the graph of a round.
        inputs: what it is given.
        layout: how the elements of lists are laid out that have the rows.
    """

    def __init__(
        self,
        partition: Partitioner,
        node: Node,
        body: Any,
        inputs: Sequence[Value],
        layout: Sharded,
    ):
        self._partition = partition
        self._node = node
        self._body = body
        self._inputs = inputs
        self._unit = layout.unit
        self._layout = ListOf(layout)
        self._takers: dict[str, list[Any]] = {}
        for operation in body.get_operations():
            if operation.type != "Identity":
                for tensor in operation.inputs:
                    name = source(tensor).name
                    self._takers.setdefault(name, []).append(operation)
        self._takes = list(body.inputs)
        self._gives = [source(tensor) for tensor in body.outputs]
        self._new: set[str] = set()
        indices = range(len(inputs))
        self._kept = {i for i in indices if self._gives[i] is self._takes[i]}
        self._counters = {i for i in indices if self._counts(i)}
        self._lists = {
            i: use for i in indices if (use := self._use(i)) is not None
        }
        self._sums = {i for i in indices if self._is_sum(i)}
        self._pops = "TensorListPopBack" in self._lists.values()

    # ---- what kind of loop it is ---------------------------------------------

    def _counts(self, index: int) -> bool:
        """Whether it is 0 at first, and one more after each round."""
        known, adding = self._inputs[index].known, self._gives[index].op
        if known is None or np.shape(known) or not _is(known[()], 0):
            return False
        if adding.type not in ("Add", "AddV2"):
            return False
        parts = [source(tensor) for tensor in adding.inputs]
        ones = [p for p in parts if p is not self._takes[index]]
        if len(ones) != 1 or len(parts) != 2 or ones[0].op.type != "Const":
            return False
        one = constant(ones[0].op)
        return one is not None and not one.shape and _is(one[()], 1)

    def is_bounded(self, condition: Any) -> bool:
        """Whether it goes round as often as there are rows."""
        waiting = [source(condition.outputs[0])]
        names = [tensor.name for tensor in condition.inputs]
        while waiting:
            operation = waiting.pop().op
            if operation.type == "LogicalAnd":
                waiting += [source(tensor) for tensor in operation.inputs]
                continue
            if operation.type != "Less":
                return False
            counter, end = (source(tensor) for tensor in operation.inputs)
            if counter.name not in names:
                return False
            if names.index(counter.name) not in self._counters:
                return False
            known = constant(end.op) if end.op.type == "Const" else None
            if end.name in names:
                at = names.index(end.name)
                known = self._inputs[at].known if at in self._kept else None
            if known is None or np.shape(known) or known[()] != self._unit.size:
                return False
        return True

    def _use(self, index: int) -> str | None:
        """What each round does with a list; None: it is none, or too much."""
        first, last = self._takes[index], self._gives[index]
        if first.dtype != tf.variant:
            return None
        found, new = [], []
        while last is not first:
            operation = last.op
            if operation.type not in _USES or last is not operation.outputs[0]:
                return None
            found.append(operation)
            before = [source(tensor) for tensor in operation.inputs]
            if operation.type == "AddN":
                made = [self._made(tensor) for tensor in before]
                new += [name for name in made if name is not None]
                pairs = zip(before, made, strict=True)
                before = [tensor for tensor, name in pairs if name is None]
                if len(before) != 1:
                    return None
            last = before[0]
        types = {operation.type for operation in found} or {""}
        if len(types) > 1:
            return None
        (use,) = types
        if use not in ("", "TensorListSetItem") and len(found) > 1:
            return None
        handles = [first, *(operation.outputs[0] for operation in found)]
        takers = [t for h in handles for t in self._takers.get(h.name, ())]
        if len([t for t in takers if t.type == use]) != len(found):
            return None
        if not all(taker.type in _USES[use] for taker in takers):
            return None
        self._new.update(new)
        return use

    def _made(self, tensor: Any) -> str | None:
        """The list that a round makes to set some of its elements, or None.

        Nothing else of the round may use it.
        """
        while tensor.op.type == "TensorListSetItem":
            if len(self._takers[tensor.name]) != 1:
                return None
            tensor = source(tensor.op.inputs[0])
        is_new = tensor.op.type == "TensorListReserve"
        if not is_new or len(self._takers[tensor.name]) != 1:
            return None
        return str(tensor.op.name)

    def _is_sum(self, index: int) -> bool:
        """Whether rounds do nothing with it but add to it."""
        adding, first = self._gives[index].op, self._takes[index]
        if adding.type not in ("Add", "AddV2", "AddN"):
            return False
        if index in self._counters or index in self._lists:
            return False
        parts = [source(tensor) for tensor in adding.inputs]
        own = [part for part in parts if part is first]
        # Texts are joined, in an order.
        if not _is_number(first.dtype):
            return False
        ends = [tensor.name for tensor in self._gives]
        return (
            len(own) == 1
            and self._takers[first.name] == [adding]
            and not self._takers.get(adding.outputs[0].name)
            and ends.count(adding.outputs[0].name) == 1
        )

    # ---- laying it out -------------------------------------------------------

    def laid_out(self) -> list[Value] | None:
        """Add the loop; return the values of its outputs."""
        carried = [i for i in range(len(self._inputs)) if i not in self._kept]
        known = self._counters | self._sums | set(self._lists)
        if not self._counters or not known.issuperset(carried):
            return None
        if self._pops and not self._only_counts():
            return None
        try:
            given = {i: self._given(i) for i in range(len(self._inputs))}
            own = {i: t for i, t in given.items() if t is not None}
            if len(own) < len(given):
                return None
            found = self._settled(carried, own)
        except NeedsExchange:
            return None
        return None if found is None else self._added(carried, own, *found)

    def _only_counts(self) -> bool:
        """Whether the rounds do not use their numbers.

        Rounds that take lists apart begin with the last row.
        """
        return all(
            self._takers.get(self._takes[i].name) == [self._gives[i].op]
            and not self._takers.get(self._gives[i].name)
            for i in self._counters
        )

    def _given(self, index: int) -> Tensor | None:
        """What each tower gives to its loop; None: it does not fit."""
        value, build = self._inputs[index], self._partition
        if index in self._counters:
            dtype = self._takes[index].dtype
            return build.cast(self._unit.start, dtype, is_repeated=False)
        if index in self._sums:
            return build.partial(value)
        if index not in self._lists or not self._is_own(index):
            # The same in all rounds.
            if self._is_sharded(value) and index in self._kept:
                return None
            return build.local(value)
        elements, use = value.element, self._lists[index]
        if use == "TensorListPushBack":
            # What is taken apart from its end would be put down backwards.
            right = value.is_replicated and elements is not None
            right = right and elements.length == 0 and not self._pops
            return build.local(value) if right else None
        if elements is None or elements.length != self._unit.size:
            return None
        return own_list(build, value, self._layout)

    def _is_sharded(self, value: Value) -> bool:
        return value.layout == self._layout

    def _is_own(self, index: int) -> bool:
        """Whether it is a list of which each round has an element."""
        used = bool(self._lists.get(index))
        return used or self._is_sharded(self._inputs[index])

    def _settled(
        self, carried: Sequence[int], given: dict[int, Tensor]
    ) -> tuple[_Round, list[Tensor], dict[int, Value]] | None:
        """A round, with what is known of lists in any of them."""
        elements = {
            index: dataclasses.replace(
                self._inputs[index].element, length=self._length(index)
            )
            for index in self._lists
            if self._is_own(index)
        }
        for _ in range(_PASSES):
            tensors, values = self._values(given, elements)
            lists = [values[index] for index in elements]
            places = [] if self._pops else [values[i] for i in self._counters]
            own = _Round(self._partition, self._unit, lists, places, self._new)
            ends = own.call(self._body, values)
            if not all(ends[index].is_replicated for index in carried):
                return None
            # What is added is not to repeat the entries of a sum.
            if not all(
                _is_whole(values[index].shape)
                and values[index].shape == ends[index].shape
                for index in self._sums
            ):
                return None
            settled = {
                index: joined(values[index], ends[index]) for index in elements
            }
            if all(alike(values[i], settled[i]) for i in settled):
                after = {index: ends[index] for index in carried}
                return own, tensors, after
            elements = {
                index: dataclasses.replace(
                    value.element, length=self._length(index)
                )
                for index, value in settled.items()
                if value.element is not None
            }
            if len(elements) < len(settled):
                return None
        return None

    def _length(self, index: int) -> Any:
        ends = ("TensorListPushBack", "TensorListPopBack")
        return None if self._lists[index] in ends else self._unit.size

    def _values(
        self, given: dict[int, Tensor], elements: dict[int, Any]
    ) -> tuple[list[Tensor], list[Value]]:
        """What a round is given that is carried, and all that it is given."""
        tensors, values = [], []
        for index, value in enumerate(self._inputs):
            own = given[index]
            if index in self._kept:
                kept = inside(
                    self._partition,
                    dataclasses.replace(
                        value, layout=REPLICATED, local=None, whole=own
                    ),
                )
                kept.element = elements.get(index, value.element)
                values.append(kept)
                continue
            like = self._takes[index]
            tensor = Tensor(like.dtype, like.shape, on_towers=True)
            tensors.append(tensor)
            shape = value.shape
            if index not in self._sums and like.shape.rank is not None:
                shape = tuple(like.shape)
            element = elements.get(index)
            values.append(
                Value(REPLICATED, whole=tensor, shape=shape, element=element)
            )
        return tensors, values

    def _added(
        self,
        carried: Sequence[int],
        given: dict[int, Tensor],
        own: _Round,
        tensors: Sequence[Tensor],
        after: dict[int, Value],
    ) -> list[Value]:
        outputs = [own.local(after[index]) for index in carried]
        operations, others = captured(own.builder, tensors, outputs)
        # Each tower goes round for its own rows.
        builder = Builder(meets=False)
        asked = [
            Tensor(tensor.dtype, tensor.shape, on_towers=True)
            for tensor in tensors
        ]
        at = next(k for k, i in enumerate(carried) if i in self._counters)
        unit = self._unit
        end = self._partition.builder.op("AddV2", [unit.start, unit.count], ())
        last = self._partition.cast(end, tensors[at].dtype, is_repeated=False)
        goes_on = builder.op("Less", [asked[at], last], ())
        captures = list(dict.fromkeys([*others, last]))
        every = [*(given[index] for index in carried), *captures]
        found = called(
            self._partition,
            self._node,
            every,
            {"T": dtypes_of(every)},
            [(t.dtype, t.shape) for t in (*tensors, *captures)],
            {
                "body": Function(
                    [*tensors, *captures], [*outputs, *captures], operations
                ),
                "cond": Function(
                    [*asked, *captures], [goes_on], builder.operations
                ),
            },
        )
        results = list(self._inputs)
        for index, local in zip(carried, found, strict=False):
            results[index] = self._result(index, local, after[index])
        return results

    def _result(self, index: int, local: Tensor, end: Value) -> Value:
        if index in self._sums:
            return Value(PARTIAL, local, shape=end.shape)
        if index in self._counters:
            total = self._partition.cast(self._unit.total, local.dtype)
            known = np.asarray(self._unit.size, object)
            return Value(REPLICATED, whole=total, shape=(), known=known)
        elements, use = end.element, self._lists[index]
        if use == "TensorListPopBack":
            # Nothing is left, as on one device.
            empty = dataclasses.replace(
                self._inputs[index].element, length=0, is_empty=True
            )
            return Value(REPLICATED, local, shape=(), element=empty)
        if elements is not None:
            # Every round has set its own.
            is_set = use == "TensorListSetItem"
            elements = dataclasses.replace(
                elements,
                length=self._unit.size,
                is_full=elements.is_full or is_set,
            )
        return Value(self._layout, local, element=elements)


class _Round(Partitioner):
    """Lays out a round: it is the same for a tower as for one device.

    Args:
        partition: has the program around it.
        unit: the rows for which a tower goes round.
        lists: those of which a tower has the elements of its rows.
        places: numbers of rows.
        new: the lists that a round makes, to add them to such, by their names.
    """

    def __init__(
        self,
        partition: Partitioner,
        unit: Any,
        lists: Sequence[Value],
        places: Sequence[Value],
        new: set[str],
    ):
        # Whatever a round makes belongs to one row: none of it has more.
        super().__init__(
            dataclasses.replace(partition.unit, size=symbol("none")),
            partition.is_first,
            partition.sizes,
            Builder(meets=False),
            partition.lists,
        )
        self.graphs = partition.graphs
        self._rows_of = unit
        self._own_lists = set(lists)
        self._places = set(places)
        self._new = new

    def _outputs(self, node: Node, inputs: list[Value]) -> list[Value]:
        is_new = node.operation.name in self._new
        if not is_new and not self._own_lists.intersection(inputs):
            return super()._outputs(node, inputs)
        if node.type == "Identity":
            return inputs
        if node.type == "TensorListLength":
            return [self._number_of_rows(node)]
        given = list(inputs)
        if node.type in ("TensorListGetItem", "TensorListSetItem"):
            if inputs[1] not in self._places:
                raise NeedsExchange
            given[1] = self._own_place(inputs[1])
        if is_new:
            given[1] = self._own_number(inputs[1])
        if node.type == "AddN" and not self._own_lists.issuperset(inputs):
            raise NeedsExchange
        outputs = super()._outputs(node, given)
        if is_new and outputs[0].element is not None:
            size = self._rows_of.size
            outputs[0].element = dataclasses.replace(
                outputs[0].element, length=size, is_full=False
            )
        if node.type == "TensorListPushBack":
            self._note_places(outputs[0], *inputs)
        if node.type == "TensorListPopBack":
            elements = inputs[0].element
            if elements is not None and elements.are_places:
                self._places.add(outputs[1])
        if (
            outputs[0].element is not None
            and node.output_dtype(0) == tf.variant
        ):
            self._own_lists.add(outputs[0])
        return outputs

    def _note_places(self, result: Value, value: Value, item: Value) -> None:
        before = value.element
        if result.element is None or before is None:
            return
        same = before.is_empty or before.are_places
        result.element = dataclasses.replace(
            result.element, are_places=same and item in self._places
        )

    def _number_of_rows(self, node: Node) -> Value:
        whole = self.cast(self._rows_of.total, node.output_dtype(0))
        known = np.asarray(self._rows_of.size, object)
        return Value(REPLICATED, whole=whole, shape=(), known=known)

    def _own_place(self, place: Value) -> Value:
        """The place of a row among those of a tower."""
        number = self.local(place)
        start = self.cast(self._rows_of.start, number.dtype)
        own = self.builder.op("Sub", [number, start], ())
        return Value(REPLICATED, whole=own, shape=())

    def _own_number(self, number: Value) -> Value:
        """How many elements a list has that a round makes on a tower."""
        known = number.known
        if known is None or known[()] != self._rows_of.size:
            raise NeedsExchange
        count = self.cast(self._rows_of.count, tf.int32)
        return Value(REPLICATED, whole=count, shape=())


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number


def _is_whole(shape: Any) -> bool:
    """Whether all sizes of a shape are known."""
    return shape is not None and None not in shape


def _is_number(dtype: Any) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_complex)
