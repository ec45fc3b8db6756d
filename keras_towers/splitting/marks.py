"""Marks in a graph: what towers exchange there, or is taken for granted.

They are operations that TensorFlow has for another purpose and Keras does not
use: each is an identity with a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_towers.partition.sizes import EXAMPLES, symbol
from keras_towers.splitting.nodes import Node
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

_PREFIX = "keras_towers: "

OWN_ROWS = "own rows"
"""Indices of the tower's examples among those of all towers."""


GRANTED = "granted"
"""What is taken for one device's."""

_GRANTED_INPUT = "granted input"
GRADIENT_THROUGH_GRANTED = f"gradient of {_GRANTED_INPUT}"
"""The gradient of what that is computed from."""


def marked(tensor: tf.Tensor, meaning: str) -> Any:
    """Return the tensor, of which the analysis will know the meaning."""
    return tf.raw_ops.PreventGradient(input=tensor, message=_PREFIX + meaning)


def meaning_in(definition: Any) -> str | None:
    """Return the meaning of an operation by its definition, or None."""
    if definition.op != "PreventGradient":
        return None
    return _meaning(definition.attr["message"].s)


def _meaning(message: bytes) -> str | None:
    text = message.decode()
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else None


def taken_for_granted(
    function: Callable[..., Sequence[tf.Tensor]],
    tensors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Call a function of examples whose results are taken for one device's.

    What a tower computes from its own examples, such as their mean, differs
    from that of one device. The analysis says nothing of it, and goes on.
    """
    results = function(*(_two_ways(t, _GRANTED_INPUT) for t in tensors))
    return [_two_ways(result, GRANTED) for result in results]


def drawn(axis: int, outer: int, inner: int) -> str:
    """Return the meaning of random numbers that one device would draw too.

    Args:
        axis: the axis that has the tower's rows of them.
        outer: the number of blocks of all examples.
        inner: the number of rows of each example in a block.
    """
    return f"drawn {axis} {outer} {inner}"


def marked_along(tensor: tf.Tensor, meaning: str) -> Any:
    """Mark a tensor, but not its gradient."""
    return _passing(tensor, meaning, lambda upstream: upstream)


def _two_ways(tensor: tf.Tensor, meaning: str) -> Any:
    """Mark a tensor, and its gradient."""

    def back(upstream: tf.Tensor) -> Any:
        return _two_ways(upstream, _other_way(meaning))

    return _passing(tensor, meaning, back)


def _other_way(meaning: str) -> str:
    """The meaning of a gradient; that of its own gradient is the first."""
    prefix = "gradient of "
    if meaning.startswith(prefix):
        return meaning.removeprefix(prefix)
    return prefix + meaning


def _passing(
    tensor: tf.Tensor, meaning: str, back: Callable[[tf.Tensor], Any]
) -> Any:
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return marked(tensor, meaning)

    @tf.custom_gradient
    def identity(value: tf.Tensor) -> Any:
        return marked(value, meaning), back

    return identity(tensor)


# The number of examples of all towers.
_OF_ALL = symbol("all")


def _exchanged(
    interpreter: Interpreter, node: Node, given: list[Value]
) -> Value:
    (value,) = given
    meaning = _meaning(node.attr("message"))
    if meaning is not None and meaning.startswith("drawn "):
        axis, outer, inner = map(int, meaning.split()[1:])
        return examples(Rows(axis, outer, inner))
    if value.kind is Kind.OTHER and meaning != OWN_ROWS:
        return value
    if meaning is None:
        return _granted(value)
    if meaning not in _MEANINGS:
        raise NotFollowed(f"takes the {meaning} over the towers")
    return _MEANINGS[meaning](value)


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


def _granted_input(value: Value) -> Value:
    """Examples, as if all were alike: then towers compute the same."""
    if value.rows is None:
        return _granted(value)
    if value.rows.unit is not None:
        raise NotFollowed("takes statistics of parts of the examples")
    rows = Rows(value.rows.axis, 1, value.rows.count, uniform=True)
    return value.with_(rows=rows, shape=value.shape)


def _gradient_of_granted_input(value: Value) -> Value:
    if value.rows is None:
        return _granted(value)
    if value.rows.count > 1 or value.rows.unit is not None:
        raise NotFollowed("takes statistics of several rows of each example")
    return value.with_(rows=Rows(value.rows.axis), shape=value.shape)


def _granted(value: Value) -> Value:
    return value.with_(shape=value.shape)


def _gradient_of_granted(value: Value) -> Value:
    """A sum over the tower's examples stands for that over all."""
    if value.kind is Kind.SUM and value.degree is not None:
        return same(value.degree + 1, shape=value.shape)
    return _granted(value)


def _span(value: Value) -> Value:
    raise DoesNotSplit("numbers the examples of the batch")


_MEANINGS: dict[str, Callable[[Value], Value]] = {
    _GRANTED_INPUT: _granted_input,
    GRADIENT_THROUGH_GRANTED: _gradient_of_granted_input,
    GRANTED: _granted,
    f"gradient of {GRANTED}": _gradient_of_granted,
    "sum": _summed,
    "gather": _gathered,
    "span": _span,
    OWN_ROWS: lambda value: examples(shape=(EXAMPLES,)),
}
SPECIAL: dict[str, Any] = {"PreventGradient": _exchanged}
