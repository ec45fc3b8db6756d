"""Loops that go round once for each example, such as those of ``tf.map_fn``.

In round k all that follows from example k has its rows along axis -1: the
rounds. Nothing else may go from one round to another than lists, of which each
round has one element, and sums, to which each round adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_towers.partition.sizes import EXAMPLES
from keras_towers.splitting.completing import constant
from keras_towers.splitting.joining import joined
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import added
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Value,
    of_known,
    other,
    product,
    same,
    total,
)

if TYPE_CHECKING:
    from keras_towers.splitting.interpreter import Interpreter

_CARRIES = "carries something from one example of the batch to the next"
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


def source(tensor: Any) -> Any:
    """Return the tensor of which another is a copy."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


class Rounds:
    """A loop that goes round once for each example.

    Args:
        body: the graph of a round.
        given: what the loop is given.
    """

    def __init__(self, body: Any, given: Sequence[Value]):
        self.body = body
        self.given = given
        self._takers: dict[str, list[Any]] = {}
        for operation in body.get_operations():
            if operation.type != "Identity":
                for tensor in operation.inputs:
                    self._takers.setdefault(source(tensor).name, []).append(
                        operation
                    )
        self._takes = list(body.inputs)
        self._gives = [source(tensor) for tensor in body.outputs]
        indices = range(len(given))
        self.kept = {i for i in indices if self._gives[i] is self._takes[i]}
        self.counters = {i for i in indices if self._counts(i)}
        self.lists = {
            i: use for i in indices if (use := self._use(i)) is not None
        }
        self.pops = "TensorListPopBack" in self.lists.values()

    def _counts(self, index: int) -> bool:
        """Whether it is 0 at first, and one more after each round."""
        known = self.given[index].known
        adding = self._gives[index].op
        if known is None or known.shape or known[()] != 0:
            return False
        if adding.type not in ("Add", "AddV2"):
            return False
        parts = [source(tensor) for tensor in adding.inputs]
        ones = [p for p in parts if p is not self._takes[index]]
        if len(ones) != 1 or ones[0].op.type != "Const":
            return False
        one = constant(ones[0].op).known
        return one is not None and not one.shape and one[()] == 1

    def is_bounded(self, condition: Any) -> bool:
        """Whether it goes round as often as there are examples."""
        waiting = [source(condition.outputs[0])]
        while waiting:
            operation = waiting.pop().op
            if operation.type == "LogicalAnd":
                waiting += [source(tensor) for tensor in operation.inputs]
                continue
            if operation.type != "Less":
                return False
            names = [tensor.name for tensor in condition.inputs]
            ends = [source(tensor).name for tensor in operation.inputs]
            if not set(ends) <= set(names):
                return False
            counter, end = (names.index(name) for name in ends)
            known = self.given[end].known
            if counter not in self.counters or end not in self.kept:
                return False
            if known is None or known.shape or known[()] != EXAMPLES:
                return False
        return True

    def _use(self, index: int) -> str | None:
        """What each round does with a list; None: it is none, or too much."""
        first, last = self._takes[index], self._gives[index]
        if self.given[index].kind is Kind.HANDLE or not _is_list(first):
            return None
        found: list[Any] = []
        while last is not first:
            operation = last.op
            if operation.type not in _USES or last is not operation.outputs[0]:
                return None
            found.append(operation)
            before = [source(tensor) for tensor in operation.inputs]
            if operation.type == "AddN":
                before = [tensor for tensor in before if not _is_new(tensor)]
                if len(before) != 1:
                    return None
            last = before[0]
        types = {operation.type for operation in found} or {""}
        (use,) = types if len(types) == 1 else ("many",)
        if use == "many" or (
            use not in ("", "TensorListSetItem") and found[1:]
        ):
            return None
        handles = [first, *(operation.outputs[0] for operation in found)]
        takers = [t for h in handles for t in self._takers.get(h.name, ())]
        changing = [t for t in takers if t.type == use]
        if len(changing) != len(found):
            return None
        return use if all(t.type in _USES[use] for t in takers) else None

    def starts_right(self, index: int) -> bool:
        """Whether a list has an element for each example, or will have."""
        value, use = self.given[index], self.lists[index]
        if use == "TensorListPushBack":
            # What is taken apart from its end would be put down backwards.
            return value.items == (0,) and not self.pops
        return use == "" or value.items == (EXAMPLES,)

    def summed(
        self, index: int, node: Node, values: dict[str, Value]
    ) -> Value | None:
        """What it is after the loop if rounds only add to it, else None."""
        adding = self._gives[index].op
        if adding.type not in ("Add", "AddV2", "AddN"):
            return None
        parts = [source(tensor) for tensor in adding.inputs]
        rest = [part for part in parts if part is not self._takes[index]]
        takers = self._takers.get(self._takes[index].name, [])
        if len(rest) != len(parts) - 1 or takers != [adding]:
            return None
        if self._takers.get(adding.outputs[0].name):
            return None
        whole = [self.given[index]]
        for value in (values[part.name] for part in rest):
            if value.kind is Kind.OTHER:
                return value
            if value.rows is not None and value.rows.axis < 0:
                whole.append(total(value.degree))
            elif value.kind is Kind.SAME:
                whole.append(same(product(value.degree, 1)))
            else:
                return None
        first = whole[0].with_(shape=())
        if first.kind not in (Kind.SAME, Kind.SUM):
            return None
        parts = [first, *(value.with_(shape=()) for value in whole[1:])]
        result = added(node, parts, "adds", [0] * len(parts))
        return result.with_(shape=self.given[index].shape)


def _is_new(tensor: Any) -> bool:
    """Whether it is a list that the round itself makes, and sets one of."""
    while tensor.op.type == "TensorListSetItem":
        tensor = source(tensor.op.inputs[0])
    return bool(tensor.op.type == "TensorListReserve")


def _is_list(tensor: Any) -> bool:
    return bool(tensor.dtype.name == "variant")


def followed(
    interpreter: Interpreter, node: Node, body: Any, condition: Any, given: Any
) -> list[Value] | None:
    """Return what a loop over the examples returns; None: it is no such."""
    rounds = Rounds(body, given)
    if interpreter.in_rounds or not rounds.is_bounded(condition):
        return None
    before = dict(interpreter.state)
    interpreter.in_rounds = True
    try:
        values = _inside(interpreter, node, rounds)
    finally:
        interpreter.in_rounds = False
    often = other(
        "goes round a loop as often as there are examples", node.operation
    )
    for key, value in interpreter.state.items():
        if value is not before.get(key):
            interpreter.state[key] = often
    results = []
    for index, value in enumerate(given):
        tensor = body.outputs[index]
        if index in rounds.kept:
            results.append(value)
        elif index in rounds.counters:
            results.append(of_known(EXAMPLES))
        elif index in rounds.lists:
            pops = rounds.lists[index] == "TensorListPopBack"
            items = (0,) if pops else (EXAMPLES,)
            results.append(
                dataclasses.replace(values[tensor.name], items=items)
            )
        else:
            results.append(_carried(rounds, index, node, values))
    return results


def _carried(
    rounds: Rounds, index: int, node: Node, values: dict[str, Value]
) -> Value:
    try:
        result = rounds.summed(index, node, values)
    except DoesNotSplit as error:
        return other(str(error), node.operation, error.is_open)
    return other(_CARRIES, node.operation) if result is None else result


def _inside(
    interpreter: Interpreter, node: Node, rounds: Rounds
) -> dict[str, Value]:
    """What the tensors of a round are, in any round."""
    given = [
        _at_first(rounds, index, value, node)
        for index, value in enumerate(rounds.given)
    ]
    while True:
        before = dict(interpreter.state)
        values = interpreter.run(rounds.body, given)
        written = {
            key
            for key, value in interpreter.state.items()
            if value is not before.get(key) and value.kind is not Kind.OTHER
        }
        # What a round writes, the next one reads.
        lost = other("writes state in a loop over the examples", node.operation)
        interpreter.state.update(dict.fromkeys(written, lost))
        after = list(given)
        for index in set(rounds.lists) - rounds.kept:
            result = values[rounds.body.outputs[index].name]
            after[index] = joined(given[index], result)
        if after == given and not written:
            return values
        given = after


def _at_first(rounds: Rounds, index: int, value: Value, node: Node) -> Value:
    if index in rounds.counters:
        # Rounds that take lists apart begin with the last example.
        if rounds.pops:
            return other("numbers the examples of the batch", node.operation)
        return Value(Kind.ROUND, shape=())
    if index in rounds.lists:
        if not rounds.starts_right(index):
            return other(_CARRIES, node.operation)
        whole = rounds.lists[index] in ("", "TensorListSetItem")
        return value if whole else dataclasses.replace(value, items=())
    if index in rounds.kept and not _is_list(rounds.body.inputs[index]):
        return value
    if value.kind is Kind.HANDLE:
        return value
    return other(_CARRIES, node.operation)
