"""How to observe the public surface of a strategy, as values to compare.

An observation takes a strategy and gives a structure of NumPy values and
strings: what stock MirroredStrategy gives for it, a tower strategy has to give.
The observations are in the modules ``surface_*``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

Observation = Callable[[tf.distribute.Strategy], Any]
OBSERVATIONS: dict[str, Observation] = {}


def observed(function: Observation) -> Observation:
    OBSERVATIONS[function.__name__] = function
    return function


def plain(value: Any) -> Any:
    """Turn what a strategy gives into values that can be compared."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, tf.distribute.DistributedValues):
        return plain(list(value.values))
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    if isinstance(value, tf.IndexedSlices):
        return plain(tf.convert_to_tensor(value))
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return value.numpy()
    return value


def replica() -> tf.distribute.ReplicaContext:
    return tf.distribute.get_replica_context()


def number(dtype: str = "float32") -> tf.Tensor:
    """The number of this replica, from 1."""
    return tf.cast(replica().replica_id_in_sync_group + 1, dtype)


def numbers(strategy: tf.distribute.Strategy, shape=(), dtype="float32"):
    """One value for each replica: its number, from 1."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: tf.fill(
            shape, tf.constant(c.replica_id_in_sync_group + 1, dtype)
        )
    )


def error_of(function: Callable[[], Any]) -> Any:
    """The outcome, or the class of the error that it ends in."""
    try:
        return plain(function())
    except Exception as error:
        return f"raises {_public(type(error))}"


def _public(error: type) -> str:
    """The first builtin or TensorFlow class that users would catch."""
    for cls in error.__mro__:
        if not cls.__module__.startswith("keras_towers"):
            return cls.__name__
    raise AssertionError(error)


def everyhow(strategy: tf.distribute.Strategy, step: Callable, *args) -> Any:
    """Run a step eagerly, as a tf.function, and inside of one."""
    traced = tf.function(step)
    whole = tf.function(lambda *args: strategy.run(step, args))
    return [
        error_of(lambda: strategy.run(step, args)),
        error_of(lambda: strategy.run(traced, args)),
        error_of(lambda: whole(*args)),
    ]
