"""Marks in a graph: what is exchanged between towers there.

They are operations that TensorFlow has for another purpose and Keras does not
use: each is an identity with a text.
"""

from __future__ import annotations

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
