"""Variables on devices: moved, mirrored on towers, and put back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.devices import same_device, same_devices
from keras_towers.errors import TowerError
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights.placement import byte_size

TowerOf: TypeAlias = int | Callable[[Any], int]
"""A tower, or a function that chooses the tower of a mirrored variable."""


class Mirrored(compat.MirroredVariable):
    """A variable with a copy on each tower."""

    @property
    def handle(self) -> Any:
        """The handle of this replica's copy; outside of replicas, the first."""
        if tf.distribute.in_cross_replica_context():
            return self.values[0].handle
        return super().handle


def mirrored(config: TowerConfig, primary: tf.Variable) -> Any:
    """Combine a variable and copies of it on the other towers."""
    start = primary.read_value()
    others = [_copy(primary, start, device) for device in config.devices[1:]]
    return Mirrored(
        config.strategy,
        [primary, *others],
        tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def relocated(variable: tf.Variable, device: str) -> tf.Variable:
    """Return a copy of a variable on a device, unless it is there already."""
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
    """Return the variable on the first device of a distributed variable."""
    primary = variable.values[0]
    if isinstance(variable, compat.SyncOnReadVariable):
        # Each may hold a part of a sum, or of a mean.
        primary.assign(variable.read_value())
    for holder in (primary, getattr(primary, "handle", None)):
        if holder is not None and hasattr(holder, "_distributed_container"):
            del holder._distributed_container
    return primary


def bind(variable: Any) -> None:
    """Give all devices the first one's value; undoes ``unbind``."""
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


class Copies:
    """Holds variables once, or with a copy on each tower.

    Args:
        config: the towers.
        mirrors: whether each tower has its own copy of the weights, as those
            with memories of their own need.
    """

    def __init__(self, config: TowerConfig, mirrors: bool):
        self._config = config
        self.mirrors: bool = mirrors and config.num_towers > 1
        self._mirrored: IdentityDict[keras.Variable, Any] = IdentityDict()
        # What variables of replicas were before a call held them once.
        self._of_replicas: IdentityDict[keras.Variable, Any] = IdentityDict()

    def hold_once(self, variable: keras.Variable) -> bool:
        """Keep a single copy of a variable; return whether it had more."""
        value = variable._value
        if not isinstance(value, compat.DistributedVariable):
            return False
        if value.distribute_strategy is not self._config.strategy:
            raise TowerError(
                f"variable {variable.path!r} was created under another "
                "strategy. Build the model outside of any scope, or inside "
                "this one's."
            )
        known = variable in self._of_replicas
        self._of_replicas[variable] = value
        variable._value = unbind(value)
        return not known

    def give_to_replicas(self) -> None:
        """Give replicas their own copies of variables that are held once."""
        for variable, value in self._of_replicas.items():
            if variable._value is value.values[0]:
                bind(value)
                variable._value = value

    def place(self, variable: keras.Variable) -> bool:
        """Hold a weight as the strategy requires; return whether it moved."""
        value = variable._value
        known = self._mirrored.get(variable)
        if known is not None and known is value:
            return False
        moved = self.hold_once(variable)
        if self.mirrors:
            value = mirrored(self._config, variable._value)
            self._mirrored[variable] = variable._value = value
            return True
        return moved

    def first_seen(self) -> contextlib.AbstractContextManager[None]:
        """Make variables resolve to the first tower's copy in this block."""
        return viewed(list(self._mirrored), lambda value: value.values[0])

    def handles(self) -> dict[int, list[Any]]:
        """Return mirrored variables' K handles, by the ids of the first."""
        found = [v._value.values for v in self._mirrored]
        return {
            id(values[0].handle): [value.handle for value in values]
            for values in found
        }

    def restore(self, variable: keras.Variable) -> None:
        """Leave a variable on the first tower only."""
        value = variable._value
        if (
            isinstance(value, compat.DistributedVariable)
            and value.distribute_strategy is self._config.strategy
        ):
            variable._value = unbind(value)
        for known in (self._mirrored, self._of_replicas):
            if variable in known:
                del known[variable]

    def restore_all(self) -> None:
        """Leave every variable on the first tower only."""
        for variable in list(self._mirrored):
            self.restore(variable)


class RelocatedVariables:
    """Moves variables to chosen devices, and back."""

    def __init__(self, empties: bool = True) -> None:
        self._empties = empties
        # The original tf.Variable of each, to which users may hold references,
        # and the device that it goes back to.
        self._before: IdentityDict[keras.Variable, tuple[tf.Variable, str]] = (
            IdentityDict()
        )

    def __contains__(self, variable: keras.Variable) -> bool:
        return variable in self._before

    def place(
        self, variable: keras.Variable, device: str, home: str | None = None
    ) -> None:
        """Move a variable.

        ``home`` is the device to return to, by default the one before the
        first move.
        """
        value = variable._value
        if variable in self._before:
            variable._value = relocated(value, device)
            return
        # Recorded first, so that a Ctrl-C in between is undone too.
        self._before[variable] = value, home or value.device
        variable._value = relocated(value, device)
        if self._empties and variable._value is not value:
            overwrite(value, tf.zeros([0], value.dtype))

    def pop_original(self, variable: keras.Variable) -> tf.Variable:
        """Return the original ``tf.Variable`` without restoring it."""
        before, _ = self._before[variable]
        del self._before[variable]
        return before

    def bytes_on(self, device: str) -> int:
        """Return the bytes of all variables that were moved to a device."""
        return sum(
            byte_size(variable.shape, variable.dtype) or 0
            for variable in self._before
            if same_device(variable._value.device, device)
        )

    def restore(self, variable: keras.Variable) -> None:
        """Restore the original ``tf.Variable``, with the current value."""
        if variable not in self._before:
            return
        before, home = self._before[variable]
        if before is not variable._value:
            overwrite(before, variable._value.read_value())
        variable._value = relocated(before, home)
        del self._before[variable]

    def restore_all(self) -> None:
        """Restore every variable that is still moved, whatever fails."""
        with contextlib.ExitStack() as stack:
            for variable in self._before:
                stack.callback(self.restore, variable)


def overwrite(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assign a value of any shape."""
    with tf.device(variable.device):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
