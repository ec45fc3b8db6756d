"""Names for what TensorFlow, Keras and users give without a type."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

Logs: TypeAlias = "dict[str, Any] | None"
"""What a method of a callback gets: the logs of a batch or an epoch."""

Structure: TypeAlias = Any
"""Tensors or arrays, nested as ``tf.nest`` allows."""

Variable: TypeAlias = "keras.Variable | tf.Variable"
"""A variable of Keras, or its value."""

JsonObject: TypeAlias = "dict[str, Any]"
"""An object of JSON."""

Step: TypeAlias = "Callable[[Structure], Structure]"
"""A step of a model: it takes a batch, and returns logs or predictions."""
