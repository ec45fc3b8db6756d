"""Variables on devices: moved, mirrored on towers, and put back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.devices import same_devices
from keras_towers.fit.contract import TowerConfig

TowerOf: TypeAlias = int | Callable[[Any], int]
"""A tower; or what returns that of a variable with copies on all."""


class Mirrored(compat.MirroredVariable):
    """A variable with a copy on each tower."""

    @property
    def handle(self) -> Any:
        """That of the copy of this replica; outside of replicas the first."""
        if tf.distribute.in_cross_replica_context():
            return self.values[0].handle
        return super().handle


def mirrored(config: TowerConfig, primary: tf.Variable) -> Any:
    """Return a variable and copies of it on the other towers, as one."""
    start = primary.read_value()
    others = [_copy(primary, start, device) for device in config.devices[1:]]
    return Mirrored(
        config.strategy,
        [primary, *others],
        tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def relocated(variable: tf.Variable, device: str) -> tf.Variable:
    """Return a copy of a variable on a device, or itself if it is there."""
    if same_devices([variable.device], [device]):
        return variable
    copy = _copy(variable, variable.read_value(), device)
    copy._unique_id = variable._unique_id
    return copy


def _copy(variable: tf.Variable, value: tf.Tensor, device: str) -> Any:
    """Create a plain variable like another one."""
    with compat.single_device_mode(), tf.device(device):
        return tf.Variable(
            value,
            dtype=variable.dtype,
            shape=variable.shape,
            trainable=variable.trainable,
            # Optimizers may have rules for names.
            name=variable.name.split(":")[0],
        )


def unbind(variable: Any) -> tf.Variable:
    """Return what a variable on several devices has on the first."""
    primary = variable.values[0]
    if isinstance(variable, compat.SyncOnReadVariable):
        # Each may hold a part of a sum, or of a mean.
        primary.assign(variable.read_value())
    for holder in (primary, getattr(primary, "handle", None)):
        if holder is not None and hasattr(holder, "_distributed_container"):
            del holder._distributed_container
    return primary


def bind(variable: Any) -> None:
    """Give all devices what the first has; undoes ``unbind``."""
    primary, *others = variable.values
    for component in variable.values:
        component._distributed_container = weakref.ref(variable)
    value = primary.read_value()
    if variable.aggregation == tf.VariableAggregation.SUM:
        value = tf.zeros_like(value)
    for other in others:
        with tf.device(other.device):
            other.assign(value, read_value=False)


@contextlib.contextmanager
def viewed(
    variables: Iterable[keras.Variable],
    resolve: Callable[[Any], Any],
) -> Iterator[None]:
    """Replace the values of distributed Keras variables inside a block."""
    swapped = []
    try:
        for variable in variables:
            value = variable._value
            if isinstance(value, compat.DistributedVariable):
                seen = resolve(value)
                # Recorded first, so that a Ctrl-C in between is undone too.
                swapped.append((variable, value))
                variable._value = seen
        yield
    finally:
        for variable, value in swapped:
            variable._value = value


def component(variable: Any, index: TowerOf = 0) -> Any:
    """Return the component of a ``tf.Variable`` on one tower."""
    if isinstance(variable, compat.DistributedVariable):
        return variable.values[index(variable) if callable(index) else index]
    return variable


def copy_to_towers(variables: Sequence[Any], index: TowerOf = 0) -> None:
    """Copy one component of every variable to all other towers."""
    for variable in variables:
        value = getattr(variable, "_value", variable)
        if not isinstance(value, compat.DistributedVariable):
            continue
        newest = component(value, index)
        with tf.device(newest.device):
            fresh = newest.read_value()
        for other in value.values:
            if other is not newest:
                with tf.device(other.device):
                    other.assign(fresh, read_value=False)
