"""Marks in a graph: what towers exchange there, or is taken for granted.

They are operations that TensorFlow has for another purpose and Keras does not
use: each is an identity with a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_PREFIX = "keras_towers: "


def marked(tensor: tf.Tensor, meaning: str) -> Any:
    """Return the tensor, of which the analysis will know the meaning."""
    return tf.raw_ops.PreventGradient(input=tensor, message=_PREFIX + meaning)


def meaning_of(node: Any) -> str | None:
    """Return the meaning of an operation that is a mark, or None."""
    text: str = node.attr("message").decode()
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else None


def taken_for_granted(
    function: Callable[..., Sequence[tf.Tensor]],
    tensors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Call a function of examples whose results are taken for one device's.

    What a tower computes from its own examples, such as their mean, differs
    from that of one device. The analysis says nothing of it, and goes on.
    """
    results = function(*(_two_ways(t, "granted input") for t in tensors))
    return [_two_ways(result, "granted") for result in results]


def _two_ways(tensor: tf.Tensor, meaning: str) -> Any:
    """Mark a tensor, and its gradient."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return marked(tensor, meaning)

    @tf.custom_gradient
    def identity(value: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> Any:
            return marked(upstream, f"gradient of {meaning}")

        return marked(value, meaning), gradient

    return identity(tensor)
