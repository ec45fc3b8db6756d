"""Marks in a graph: what towers exchange there, or is taken for granted.

They are operations that TensorFlow has for another purpose and Keras does not
use: each is an identity with a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

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


def meaning_of(node: Any) -> str | None:
    """Return the meaning of an operation that is a mark, or None."""
    text: str = node.attr("message").decode()
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else None


def meaning_in(definition: Any) -> str | None:
    """Return the meaning of an operation by its definition, or None."""
    if definition.op != "PreventGradient":
        return None
    text = definition.attr["message"].s.decode()
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
