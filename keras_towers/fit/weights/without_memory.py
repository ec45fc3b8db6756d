"""Variables without memory: until their first use, or in dry runs."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.context import patches, thread_state
from keras_towers.fit.weights.copies import copy_on_tower
from keras_towers.fit.weights.shards import (
    SMALLEST_BYTES,
    ShardedVariable,
    part_of,
)
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Variable

PartOf: TypeAlias = Callable[[Sequence[int], Sequence[int]], tf.Tensor]
"""Returns a part of a value, given where it begins, and its size."""

# First values from so many bytes on are computed in functions.
_LARGE_BYTES = 2**24


def is_constant(initializer: Any) -> bool:
    """Whether an initializer gives all entries the same value."""
    if isinstance(initializer, keras.initializers.Constant):
        return np.ndim(initializer.value) == 0
    constant = keras.initializers.Zeros, keras.initializers.Ones
    return isinstance(initializer, constant)


def is_repeatable(initializer: Any) -> bool:
    """Whether an initializer returns the same value in each call.

    Keras's own initializers do, except with a ``SeedGenerator``.
    """
    if isinstance(initializer, compat.RandomInitializer):
        is_own = type(initializer).__module__.startswith("keras.src.")
        return is_own and isinstance(initializer.seed, int)
    return is_constant(initializer)


class DeferredVariable(compat.UninitializedVariable):
    """A variable without memory until it is written or used in a graph.

    Until then, each read outside of graphs computes its first value again. Its
    users see an ordinary variable.

    Args:
        like: a variable with its name, shape and dtype.
        initializer: returns the first value, the same one each time, given a
            shape and a dtype.
        device: where it is.

    Attributes:
        first_value: returns the first value; None: it has a value, or needs
            none.
    """

    first_value: Callable[[], tf.Tensor] | None = None

    def __init__(
        self,
        like: Any,
        initializer: Callable[..., tf.Tensor],
        device: str = compat.HOST,
    ):
        with (
            tf.init_scope(),
            compat.single_device_mode(),
            tf.device(device),
        ):
            super().__init__(
                trainable=like.trainable,
                name=like.name,
                shape=like._shape,
                dtype=tf.as_dtype(like._dtype),
            )
        # The value at its handle may be empty.
        self._validate_shape = False
        self._initializer = functools.partial(initializer, dtype=like._dtype)
        step = thread_state.current_step()
        self._made_in = None if step is None else weakref.ref(step)
        make = functools.partial(self._initializer, like._shape)
        self.first_value = make
        if math.prod(like._shape) * self.dtype.size >= _LARGE_BYTES:
            # There, operations take over the memory of their inputs.
            self.first_value = tf.function(make, autograph=False)

    def first_parts(self) -> PartOf:
        """Return a function that returns parts of the first value."""
        if is_constant(self._initializer.func):
            return lambda _, size: self._initializer(size)
        return functools.partial(part_of, self.read_value())

    @property
    def device(self) -> str:
        """The device of the value."""
        return str(self._handle.device)

    @property
    def handle(self) -> tf.Tensor:
        """The handle; from now on the variable has memory."""
        if self.first_value is not None and not self._is_only_traced():
            with tf.init_scope():
                self._overwrite(self.first_value())
            self.first_value = None
        return self._handle

    def _is_only_traced(self) -> bool:
        """Whether the current graph never runs."""
        # Keras asks for shapes in one, and a trace that makes variables is one.
        step = thread_state.current_step()
        made_here = self._made_in is not None and self._made_in() is step
        is_traced = made_here and not tf.executing_eagerly()
        return is_traced or compat.in_symbolic_scope()

    def assign(self, *args: object, **kwargs: object) -> Any:
        """Write a value; the first value is then never computed."""
        first_value = self.first_value
        if tf.executing_eagerly():
            self.first_value = None
        try:
            return super().assign(*args, **kwargs)
        except Exception:
            self.first_value = first_value
            raise

    def _read_variable_op(self, *args: object, **kwargs: object) -> tf.Tensor:
        first_value = self.first_value
        if first_value is None or not tf.executing_eagerly():
            return super()._read_variable_op(*args, **kwargs)
        try:
            # As any read, so that tapes see it.
            return super()._read_variable_op(*args, **kwargs)
        finally:
            self._overwrite(tf.zeros([0], self.dtype))
            self.first_value = first_value

    def _overwrite(self, value: tf.Tensor) -> None:
        with tf.device(self.device):
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)


def is_deferred(variable: Variable) -> bool:
    """Whether a variable, of Keras or TensorFlow, is still deferred."""
    value = getattr(variable, "_value", variable)
    return isinstance(value, DeferredVariable) and value.first_value is not None


def deferring_constants(
    shapes: Collection[tuple[int, ...]],
) -> contextlib.AbstractContextManager[None]:
    """Return a block that defers Keras variables that begin as constants.

    Args:
        shapes: those of the variables.
    """

    def defer(
        original: patches.Original, variable: Any, initializer: Any
    ) -> None:
        if variable._shape in shapes and is_constant(initializer):
            variable._initialize(DeferredVariable(variable, initializer))
        else:
            original(variable, initializer)

    return patches.replaced(
        (compat.KerasVariable, "_initialize_with_initializer", defer)
    )


# ---- of models whose steps never run -----------------------------------------


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Create large Keras variables without memory in this block."""

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
    """A variable that reads as zeros, and ignores writes.

    In a graph it is an ordinary variable.
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
    """Return a variable of the current graph, like another one."""
    like = WithoutMemory(
        trainable=variable.trainable,
        name=variable.name,
        shape=variable.shape,
        dtype=variable.dtype,
    )
    # Optimizers look up slots by it.
    like._unique_id = copy_on_tower(variable._value)._unique_id
    return like
