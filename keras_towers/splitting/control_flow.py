"""Functions, branches and loops."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_towers import compat
from keras_towers.splitting import rounds
from keras_towers.splitting.joining import joined
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import aligned
from keras_towers.splitting.values import (
    Kind,
    NotFollowed,
    Value,
    other,
)
from keras_towers.splitting.variables import current

if TYPE_CHECKING:
    from keras_towers.splitting.interpreter import Interpreter

# More rounds of an analysis change nothing, or the loop cannot be followed.
_ROUNDS = 8


def graph_of(node: Node, name: str) -> Any:
    """Return the graph of a function that an operation calls."""
    graph = compat.graph_of_function(node.operation.graph, name)
    if graph is None:
        raise NotFollowed("calls a function whose operations are not known")
    return graph


def _call(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> list[Value]:
    return interpreter.call(graph_of(node, node.attr("f").name), given)


def _branches(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> list[Value]:
    if node.type.endswith("Case"):
        names = [branch.name for branch in node.attr("branches")]
    else:
        names = [node.attr(f"{n}_branch").name for n in ("else", "then")]
    chosen, *inputs = given
    known = None if chosen.known is None else chosen.known.flat[0]
    if isinstance(known, (bool, int)):
        # The last branch is that of all other numbers.
        at = int(known) if 0 <= known < len(names) else -1
        return interpreter.call(graph_of(node, names[at]), inputs)
    before = dict(interpreter.state)
    results, states = [], []
    for name in names:
        interpreter.state = dict(before)
        results.append(interpreter.call(graph_of(node, name), inputs))
        states.append(interpreter.state)
    interpreter.state = dict(before)
    text = "chooses a branch by the examples of the batch"
    reason = _reason(node, chosen, text)
    for key in {key for state in states for key in _written(before, state)}:
        was = current(interpreter, key)
        # A branch that writes nothing differs from one that does.
        interpreter.state[key] = reason or functools.reduce(
            joined, (state.get(key, was) for state in states)
        )
    return [
        _one_of(node, chosen, values, reason)
        for values in zip(*results, strict=True)
    ]


def _written(
    before: Mapping[Any, Value], after: Mapping[Any, Value]
) -> set[Any]:
    """The variables that were written, be it with what is alike."""
    return {key for key, v in after.items() if v is not before.get(key)}


def _reason(node: Node, chosen: Value, text: str) -> Value | None:
    """Why the towers may go different ways; None: they do not."""
    if chosen.is_same:
        return None
    if chosen.kind is Kind.OTHER:
        return chosen.with_()
    return other(text, node.operation)


def _one_of(
    node: Node, chosen: Value, values: Sequence[Value], reason: Value | None
) -> Value:
    kinds = {value.kind for value in values}
    if (
        chosen.rows is not None
        and chosen.rows.axis < 0
        and kinds <= {Kind.SAME, Kind.ROWS}
        and not any(value.items or value.key for value in values)
    ):
        # Every example has a round of a loop, in which it may choose.
        ranks = [0] * (1 + len(values))
        either = functools.reduce(joined, values)
        if either.kind is Kind.OTHER:
            return either
        degree = either.degree
        result = aligned(node, [chosen, *values], degree, ranks)
        return result.with_(shape=either.shape)
    if reason is not None and not all(v.kind is Kind.HANDLE for v in values):
        return reason
    return functools.reduce(joined, values)


def _loop(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> list[Value]:
    body = graph_of(node, node.attr("body").name)
    condition = graph_of(node, node.attr("cond").name)
    results = rounds.followed(interpreter, node, body, condition, given)
    if results is not None:
        return results
    values = list(given)
    written: set[Any] = set()
    for _ in range(_ROUNDS):
        before = dict(interpreter.state)
        after = interpreter.call(body, values)
        written |= _written(before, interpreter.state)
        # What was known of the first round may not be known of the others.
        results = [joined(v, w) for v, w in zip(values, after, strict=True)]
        interpreter.state = _joined_states(
            interpreter, before, interpreter.state
        )
        if _alike(results, values) and interpreter.state == before:
            break
        values = results
    else:
        lost = other(
            "goes round a loop that cannot be followed",
            node.operation,
            is_open=True,
        )
        interpreter.state.update(dict.fromkeys(written, lost))
        return [lost] * len(given)
    (goes_on,) = interpreter.call(condition, values)
    text = "goes round a loop as often as follows from the batch"
    reason = _reason(node, goes_on, text)
    if reason is None:
        return values
    interpreter.state.update(dict.fromkeys(written, reason))
    return [
        value if _is_kept(body, index) else reason
        for index, value in enumerate(given)
    ]


def _is_kept(body: Any, index: int) -> bool:
    """Whether the rounds of a loop leave what it goes round with."""
    return rounds.source(body.outputs[index]) is body.inputs[index]


def _alike(a: Sequence[Value], b: Sequence[Value]) -> bool:
    return all(
        v == w and v.shape == w.shape and np.array_equal(v.known, w.known)
        for v, w in zip(a, b, strict=True)
    )


def _joined_states(
    interpreter: Interpreter, a: Mapping[Any, Value], b: Mapping[Any, Value]
) -> dict[Any, Value]:
    changed = {
        key: joined(a.get(key) or current(interpreter, key), b[key])
        for key in _written(a, b)
    }
    return {**a, **changed}


SPECIAL: dict[str, Any] = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), _call),
    **dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), _branches),
    **dict.fromkeys(("While", "StatelessWhile"), _loop),
}
