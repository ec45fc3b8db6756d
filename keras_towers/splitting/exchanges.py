"""What a step exchanges between towers, where it says so by marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_towers.splitting.marks import OWN_ROWS, meaning_of
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import RULES
from keras_towers.splitting.sizes import EXAMPLES, symbol
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Rows,
    Value,
    examples,
    same,
)

if TYPE_CHECKING:
    from keras_towers.splitting.interpreter import Interpreter


# The number of examples of all towers.
_OF_ALL = symbol("all")


def _exchanged(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> Value:
    (value,) = given
    meaning = meaning_of(node)
    if meaning is not None and meaning.startswith("drawn "):
        return examples(*map(int, meaning.split()[1:]))
    if value.kind is Kind.OTHER and meaning != OWN_ROWS:
        return value
    if meaning is None:
        return RULES["PreventGradient"](node, value)  # type: ignore[return-value]
    if meaning not in _MEANINGS:
        raise NotFollowed(f"takes the {meaning} over the towers")
    result: Value = _MEANINGS[meaning](value)
    return result


def _summed(value: Value) -> Value:
    """All towers get the sum of what they have."""
    if (
        value.degree_as_sum == 0
        and value.kind is not Kind.ROWS
        or value.kind is Kind.SUM
        and value.degree is None
    ):
        return same(shape=value.shape)
    if value.kind is Kind.SAME and value.degree is None:
        return same(None, shape=value.shape)
    raise DoesNotSplit("sums over the towers what is no sum over the batch")


def _gathered(value: Value) -> Value:
    """All towers get the rows of all."""
    if value.rows is None or not value.is_free:
        raise DoesNotSplit("gathers what is no example of the batch")
    if value.rows.draw is not None and value.rows.count > 1:
        raise NotFollowed("gathers random numbers of examples")
    if value.rows.unit is not None:
        raise NotFollowed("gathers parts of the examples")
    if value.rows.axis or value.rows.outer > 1:
        raise DoesNotSplit("gathers along another axis than that of examples")
    shape = value.shape
    if shape is not None:
        shape = (value.rows.count * _OF_ALL, *shape[1:])
    return same(value.degree, shape=shape)


def _span(value: Value) -> Value:
    raise DoesNotSplit("numbers the examples of the batch")


def _own_rows(value: Value) -> Value:
    """Indices of the tower's rows among those of all."""
    return examples(shape=(EXAMPLES,))


def _granted_input(value: Value) -> Value:
    """Examples, as if all were alike: then towers compute the same."""
    if value.rows is None:
        return value.with_(shape=value.shape)
    if value.rows.unit is not None:
        raise NotFollowed("takes statistics of parts of the examples")
    rows = Rows(value.rows.axis, 1, value.rows.count, uniform=True)
    return value.with_(rows=rows, shape=value.shape)


def _gradient_of_granted_input(value: Value) -> Value:
    if value.rows is None:
        return value.with_(shape=value.shape)
    if value.rows.count > 1 or value.rows.unit is not None:
        raise NotFollowed("takes statistics of several rows of each example")
    return value.with_(rows=Rows(value.rows.axis), shape=value.shape)


def _granted(value: Value) -> Value:
    return value.with_(shape=value.shape)


def _gradient_of_granted(value: Value) -> Value:
    """A sum over the tower's examples stands for that over all."""
    if value.kind is Kind.SUM and value.degree is not None:
        return same(value.degree + 1, shape=value.shape)
    return value.with_(shape=value.shape)


_MEANINGS: dict[str, Any] = {
    "granted input": _granted_input,
    "gradient of granted input": _gradient_of_granted_input,
    "granted": _granted,
    "gradient of granted": _gradient_of_granted,
    "sum": _summed,
    "gather": _gathered,
    "span": _span,
    OWN_ROWS: _own_rows,
}
SPECIAL: dict[str, Any] = {"PreventGradient": _exchanged}
