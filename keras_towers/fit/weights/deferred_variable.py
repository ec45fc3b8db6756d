"""Variables whose first value has no memory until it is needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import patches
from keras_towers.fit.weights.shards import part_of

PartOf: TypeAlias = Callable[[Sequence[int], Sequence[int]], tf.Tensor]
"""Returns a part of a value, given where it begins, and its size."""


def is_constant(initializer: Any) -> bool:
    """Whether an initializer gives all entries one value."""
    if isinstance(initializer, keras.initializers.Constant):
        return np.ndim(initializer.value) == 0
    constant = keras.initializers.Zeros, keras.initializers.Ones
    return isinstance(initializer, constant)


def is_repeatable(initializer: Any) -> bool:
    """Whether an initializer returns the same value when it is called again.

    Keras's own do, but with a ``SeedGenerator``.
    """
    if isinstance(initializer, compat.RandomInitializer):
        is_own = type(initializer).__module__.startswith("keras.src.")
        return is_own and isinstance(initializer.seed, int)
    return is_constant(initializer)


class DeferredVariable(compat.UninitializedVariable):
    """A variable that keeps no value until it is written, or used in a graph.

    Until then each read outside of graphs computes its first value again. To
    its users it is an ordinary variable, on the host.

    Args:
        like: a variable with its name, shape and dtype.
        initializer: returns the first value, the same one each time, given a
            shape and a dtype.

    Attributes:
        first_value: returns the first value; None: it has a value, or needs
            none.
    """

    first_value: Callable[[], tf.Tensor] | None = None

    def __init__(self, like: Any, initializer: Callable[..., tf.Tensor]):
        with (
            tf.init_scope(),
            compat.single_device_mode(),
            tf.device(compat.HOST),
        ):
            super().__init__(
                trainable=like.trainable,
                name=like.name,
                shape=like._shape,
                dtype=tf.as_dtype(like._dtype),
            )
        # What its handle holds may be empty.
        self._validate_shape = False
        self._initializer = functools.partial(initializer, dtype=like._dtype)
        self.first_value = functools.partial(self._initializer, like._shape)

    def first_parts(self) -> PartOf:
        """Return what returns parts of the first value."""
        if is_constant(self._initializer.func):
            return lambda _, size: self._initializer(size)
        return functools.partial(part_of, self.read_value())

    @property
    def device(self) -> str:
        """The device of its value."""
        return str(self._handle.device)

    @property
    def handle(self) -> tf.Tensor:
        """The handle, which has a value from now on."""
        # Keras asks for shapes in a graph that never runs.
        if self.first_value is not None and not compat.in_symbolic_scope():
            with tf.init_scope():
                self._overwrite(self.first_value())
            self.first_value = None
        return self._handle

    def assign(self, *args: object, **kwargs: object) -> Any:
        """Write a value; the first one is then never computed."""
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
        with tf.device(compat.HOST):
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)


def is_deferred(variable: keras.Variable) -> bool:
    """Whether a variable of Keras still has no more than its first value."""
    value = variable._value
    return isinstance(value, DeferredVariable) and value.first_value is not None


def deferring_constants() -> contextlib.AbstractContextManager[None]:
    """Return a block in which variables that begin as a constant are deferred.

    Of those of Keras.
    """
    return patches.replaced(
        (compat.KerasVariable, "_initialize_with_initializer", _defer_constant)
    )


def _defer_constant(
    original: Callable[..., None], variable: Any, initializer: Any
) -> None:
    if is_constant(initializer):
        variable._initialize(DeferredVariable(variable, initializer))
    else:
        original(variable, initializer)
