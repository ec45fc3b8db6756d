"""Which variables code of the user has written.

Ranks share values when a call begins. In a loop over batches, calls share them
only if a rank has written a variable since the last one:
``fit/calls/tower_runner.py`` asks here, and the next step compares what it
finds. Of callbacks, ``fit/calls/callback_effects.py`` asks.
``keras_patches.py`` notes writes by Python and by functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.weights.copies import (
    copy_first,
    parts_of,
    read_handle,
)
from keras_towers.fit.weights.shards import spans_ranks
from keras_towers.fit.weights.without_memory import is_deferred
from keras_towers.partition.ir.effects import written

# The handles of variables, by their ids.
_written: weakref.WeakValueDictionary[int, tf.Tensor]
_written = weakref.WeakValueDictionary()
_number = 0
# The call of Keras in whose callbacks writes are noted, too; None: in no call.
noting_in: ThreadLocal[object] = ThreadLocal()
# Of functions: the indices of the inputs that are variables they may write.
_writes: weakref.WeakKeyDictionary[Any, Sequence[int]]
_writes = weakref.WeakKeyDictionary()


class OuterVariable:
    """A variable that no layer of a model has, as a step finds it.

    Args:
        handles: those of its copies on K towers, or its only handle.
        devices: the K towers' devices.
    """

    def __init__(self, handles: Sequence[tf.Tensor], devices: Sequence[str]):
        with tf.init_scope():
            value = read_handle(handles[0])
        self.shape: tf.TensorShape = value.shape
        self.dtype: tf.DType = value.dtype
        self.path: str = f"a variable {self.shape} {self.dtype.name}"
        self.handles: Sequence[tf.Tensor] = handles
        self._devices = devices[: len(handles)]

    @property
    def _value(self) -> OuterVariable:
        return self

    def read_value(self) -> tf.Tensor:
        """Return the value."""
        return read_handle(self.handles[0])

    def assign(self, value: tf.Tensor) -> None:
        """Assign a value to all copies."""
        tf.raw_ops.AssignVariableOp(resource=self.handles[0], value=value)
        copy_first(self.handles, self._devices)


def note(handle: Any) -> None:
    """Note that a variable is written, if this is its handle."""
    global _number
    is_new = id(handle) not in _written and isinstance(handle, tf.Tensor)
    is_handle = is_new and handle.dtype == tf.resource
    if is_handle and not tf.is_symbolic_tensor(handle):
        _written[id(handle)] = handle
        _number += 1


def note_call(function: Any, tensors: Sequence[Any]) -> None:
    """Note the variables that a concrete function writes, given its inputs."""
    if not any(getattr(t, "dtype", None) == tf.resource for t in tensors):
        return
    if function not in _writes:
        inputs = {id(t): k for k, t in enumerate(function.graph.inputs)}
        changed = {
            inputs.get(id(operation.inputs[k]))
            for operation in function.graph.get_operations()
            for k in written(operation)
        }
        _writes[function] = [k for k in changed if k is not None]
    for index in _writes[function]:
        note(tensors[index])


def number() -> int:
    """Return how many writes were noted that nobody had asked for before."""
    return _number


def take(variables: Sequence[Any]) -> list[int]:
    """Return the indices of variables that were written, and forget it.

    Ranks write together what they divide among themselves.

    Args:
        variables: of Keras, or ``OuterVariable``s.
    """
    found = []
    for index, variable in enumerate(variables):
        handles: Sequence[tf.Tensor] = ()
        if isinstance(variable, OuterVariable):
            handles = variable.handles
        elif not (spans_ranks(variable) or is_deferred(variable)):
            # What has its first value is not written, and takes no memory.
            parts = parts_of(variable)
            handles = [copy.handle for part in parts for copy in part.copies]
        known = [_written.pop(id(handle), None) for handle in handles]
        if any(handle is not None for handle in known):
            found.append(index)
    return found
