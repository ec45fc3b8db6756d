"""Variables without memory, of models whose steps never run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._types import Variable
from keras_towers.fit.context import patches
from keras_towers.fit.weights.copies import copy_on_tower
from keras_towers.fit.weights.shards import SMALLEST_BYTES, ShardedVariable


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Create large variables of Keras without memory in this block."""

    def initialize(
        original: Callable[..., None], variable: Variable, value: object
    ):
        shape = variable._shape
        if callable(value) and shape is not None:
            dtype = tf.as_dtype(variable._dtype)
            if math.prod(shape) * dtype.size >= SMALLEST_BYTES:
                value = WithoutMemory(
                    trainable=variable.trainable,
                    name=variable.name,
                    shape=shape,
                    dtype=dtype,
                )
        original(variable, value)

    with patches.replaced((compat.KerasVariable, "_initialize", initialize)):
        yield


class WithoutMemory(compat.UninitializedVariable):
    """A variable that reads as zeros, and keeps nothing that is written.

    In a graph it is an ordinary one.
    """

    def _read_variable_op(self, *args: object, **kwargs: object) -> tf.Tensor:
        if tf.executing_eagerly():
            return tf.zeros(self.shape, self.dtype)
        return super()._read_variable_op(*args, **kwargs)


def _writing(name: str) -> Callable[..., object]:
    original = getattr(compat.UninitializedVariable, name)

    def method(variable: Variable, *args: object, **kwargs: object) -> Any:
        if tf.executing_eagerly():
            return variable
        return original(variable, *args, **kwargs)

    return method


for _name in ("assign", "assign_add", "assign_sub"):
    setattr(WithoutMemory, _name, _writing(_name))


@contextlib.contextmanager
def graph_without_memory() -> Iterator[None]:
    """Create variables without a value in a graph that never runs."""

    def create(_: Any, next_creator: Any = None, **given: Any) -> Any:
        value = given.pop("initial_value")
        value = value() if callable(value) else value
        if not isinstance(value, tf.Tensor):
            value = tf.convert_to_tensor(value, given.get("dtype"))
        given["shape"] = given.get("shape") or value.shape
        return WithoutMemory(**{**given, "dtype": value.dtype})

    creator = (compat.variables_module, "default_variable_creator_v2", create)
    # A rank has no value of what is in shards over all of them.
    keeper = (ShardedVariable, "_overwrite", lambda *_: None)
    with tf.Graph().as_default(), patches.replaced(creator, keeper):
        yield


def variable_like(variable: keras.Variable) -> tf.Variable:
    """Return a variable of the current graph like another one."""
    like = WithoutMemory(
        trainable=variable.trainable,
        name=variable.name,
        shape=variable.shape,
        dtype=variable.dtype,
    )
    # Optimizers look up slots by it.
    like._unique_id = copy_on_tower(variable._value)._unique_id
    return like
