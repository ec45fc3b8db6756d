"""Variables on devices: moved, mirrored on towers, and put back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat, devices
from keras_towers._types import Variable
from keras_towers.devices import same_device
from keras_towers.errors import TowerError
from keras_towers.fit.components import TowerConfig
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.weights.copies import (
    copy_on_tower,
    copy_to_towers,
    is_copied,
    native,
)
from keras_towers.fit.weights.joint_access import JointAccess
from keras_towers.fit.weights.mirrored_variable import TowerMirroredVariable
from keras_towers.fit.weights.shards import (
    ShardedVariable,
    current_value,
    part_of,
)
from keras_towers.fit.weights.without_memory import is_deferred
from keras_towers.partition.layouts import MIRRORED, MeshLayout, Replicated
from keras_towers.system import return_freed_memory

_SUM = tf.VariableAggregation.SUM


def mirrored(
    config: TowerConfig, primary: tf.Variable
) -> TowerMirroredVariable:
    """Combine a variable and copies of it on the other towers."""
    start = primary.read_value()
    others = [_copy(primary, start, device) for device in config.devices[1:]]
    return TowerMirroredVariable(
        config.strategy,
        [primary, *others],
        tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def copy_to_device(variable: tf.Variable, device: str) -> tf.Variable:
    """Return a variable if it is on a device, else a copy on the device."""
    if same_device(variable.device, device):
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
            # Optimizers may have rules that depend on names.
            name=variable.name.split(":")[0],
        )


def unbind(
    variable: Variable, has_parts: bool, asks_ranks: bool = True
) -> tf.Variable:
    """Return the variable on the first device of a distributed variable.

    Args:
        variable: the distributed variable.
        has_parts: whether replicas hold parts of a sum or of a mean, which are
            reduced over all ranks; otherwise all replicas hold the same value,
            and nothing is exchanged.
        asks_ranks: whether the other ranks take part; otherwise the parts of a
            sum are reduced over the replicas of this process.
    """
    primary = variable.values[0]
    if isinstance(variable, compat.SyncOnReadVariable):
        value = primary.read_value()
        is_sum = variable.aggregation == _SUM
        if has_parts and asks_ranks:
            value = variable.read_value()
        elif has_parts and is_sum:
            value = tf.add_n([part.read_value() for part in variable.values])
        elif is_sum:
            count = variable.distribute_strategy.num_replicas_in_sync
            value *= tf.cast(count, value.dtype)
        primary.assign(value)
    for holder in (primary, getattr(primary, "handle", None)):
        if holder is not None and hasattr(holder, "_distributed_container"):
            del holder._distributed_container
    return primary


def bind(variable: Variable, rank: int) -> None:
    """Give all devices the value of the first device; undoes ``unbind``.

    A sum goes to the first device of rank 0; all other parts are 0.
    """
    primary, *others = variable.values
    for copy in variable.values:
        copy._distributed_container = weakref.ref(variable)
    value = primary.read_value()
    if variable.aggregation == _SUM:
        value = tf.zeros_like(value)
        if rank > 0:
            primary.assign(value)
    for other in others:
        with tf.device(other.device):
            other.assign(value, read_value=False)


@contextlib.contextmanager
def with_values(values: Iterable[tuple[keras.Variable, Any]]) -> Iterator[None]:
    """Replace the values of Keras variables inside a block."""
    before = []
    try:
        for variable, value in values:
            if variable._value is not value:
                # Recorded first, so that a Ctrl-C in between is undone too.
                before.append((variable, variable._value))
                variable._value = value
        yield
    finally:
        for variable, value in reversed(before):
            variable._value = value


@dataclasses.dataclass(frozen=True, eq=False)
class TowerHandles:
    """The handles of a variable of which every tower has a part.

    Attributes:
        layout: what the parts are: copies, or shards.
        handles: for each of K towers, or for the only one, the handles of its
            columns.
    """

    layout: MeshLayout
    handles: Sequence[Sequence[Any]]

    def of_tower(self, tower: int, column: int = 0) -> tf.Tensor:
        """Return the handle of a tower's column."""
        row = tower if len(self.handles) > 1 else 0
        return self.handles[row][column]


class TowerVariables:
    """Places the variables of a strategy's models, and puts them back later.

    A variable has a single copy, has a copy on each tower, is in shards, or is
    moved to a device.

    Args:
        config: the towers.
        mirrors: whether each tower has its own copy of the weights, as towers
            with separate memories need.
    """

    def __init__(self, config: TowerConfig, mirrors: bool):
        self._config = config
        self.mirrors: bool = mirrors and config.num_towers > 1
        self._mirrored: IdentityDict[keras.Variable, TowerMirroredVariable] = (
            IdentityDict()
        )
        # Whether replicas may have written parts. A single process can always
        # reduce them, since it exchanges nothing.
        self.has_parts: bool = config.job.size == 1
        # Whether the other ranks take part in reductions of parts.
        self.asks_ranks = True
        self.access: JointAccess = JointAccess(config.shards)
        # The distributed values of variables that have a single copy.
        self._of_replicas: IdentityDict[keras.Variable, Any] = IdentityDict()
        # For each moved variable: its original tf.Variable, to which users may
        # hold references, and the device to move it back to.
        self._moved: IdentityDict[keras.Variable, tuple[tf.Variable, str]] = (
            IdentityDict()
        )

    def hold_once(self, variable: keras.Variable) -> bool:
        """Keep a single copy of a variable; return whether it had more."""
        # Another block may have left it in shards.
        value = current_value(variable)
        if not is_copied(value):
            return False
        if value.distribute_strategy is not self._config.strategy:
            raise TowerError(
                f"variable {variable.path!r} was created under another "
                "strategy. Build the model outside of any scope, or inside "
                "this one's."
            )
        known = variable in self._of_replicas
        self._of_replicas[variable] = value
        variable._value = unbind(value, self.has_parts, self.asks_ranks)
        return not known

    def unfold_for_replicas(self) -> None:
        """Give replicas their own copies of variables with a single copy."""
        self.has_parts = True
        for variable, value in self._of_replicas.items():
            if variable._value is value.values[0]:
                bind(value, self._config.job.rank)
                variable._value = value

    def place(self, variable: keras.Variable) -> bool:
        """Place a weight as the strategy requires; return whether it moved."""
        if self._mirrored.get(variable) is variable._value:
            return False
        moved = self.hold_once(variable)
        if not self.mirrors:
            return moved
        value = mirrored(self._config, variable._value)
        self._mirrored[variable] = variable._value = value
        return True

    def move(self, variable: keras.Variable, device: str) -> None:
        """Move a variable to a device, as a single copy."""
        self.hold_once(variable)
        value = variable._value
        if variable not in self._moved:
            # Recorded first, so that a Ctrl-C in between is undone too.
            self._moved[variable] = value, value.device
        variable._value = copy_to_device(value, device)

    @property
    def moved(self) -> Collection[keras.Variable]:
        """The variables that were moved, or divided."""
        return self._moved.keys()

    def divided(self, variable: Variable) -> ShardedVariable | None:
        """Return the value of a variable of Keras that is divided here."""
        value = native(variable)
        is_divided = isinstance(value, ShardedVariable)
        return value if is_divided and variable in self._moved else None

    def divide(
        self,
        variable: keras.Variable,
        layout: MeshLayout,
        place: str = "",
        back_to: str | None = None,
    ) -> None:
        """Divide a variable, and free the original.

        Args:
            variable: the variable.
            layout: how it is divided.
            place: names it, equally on all ranks.
            back_to: the device to restore it to; None: the current one.
        """
        self.hold_once(variable)
        value: Any = variable._value
        if isinstance(value, ShardedVariable):
            # Another block has left it in shards.
            with tf.init_scope(), compat.single_device_mode():
                value = tf.Variable(value)
        # Recorded first, so that a Ctrl-C in between is undone too.
        self._moved[variable] = value, back_to or value.device
        self._mirrored.pop(variable, None)
        with tf.init_scope(), tf.device(compat.HOST):
            was_deferred = is_deferred(variable)
            if was_deferred:
                part = value.first_parts()
            else:
                part = functools.partial(part_of, value.read_value())
        access = self.access if self.access.size > 1 else None
        if access is not None:
            access.serve_at_exit()
        divided = ShardedVariable(
            value,
            part,
            layout,
            self._mesh_of(layout),
            access,
            place,
            variable.path,
        )
        divided._unique_id = value._unique_id  # Optimizers look up slots by it.
        variable._value = divided
        del part
        with tf.init_scope():
            # A graph keeps the shape of what is assigned.
            if was_deferred:
                value.first_value = None
            elif tf.executing_eagerly():
                overwrite(value, tf.zeros([0], value.dtype))
            if tf.executing_eagerly():
                return_freed_memory()

    def _mesh_of(self, layout: MeshLayout) -> Sequence[Sequence[str]]:
        """Return the devices of the shards of a variable."""
        mesh = self._config.mesh
        if devices.all_on_host(itertools.chain(*mesh)) and not self.mirrors:
            # They share the memory of the host.
            mesh = [[mesh[0][0] for _ in row] for row in mesh]
        return mesh[:1] if isinstance(layout.towers, Replicated) else mesh

    def home_of(self, variable: Variable) -> str:
        """Return the device that a variable of Keras is restored to."""
        if variable in self._moved:
            _, device = self._moved[variable]
            return device
        return str(copy_on_tower(native(variable), 0).device)

    def copy_first(self) -> None:
        """Copy what the first tower has of mirrored variables to the others."""
        copy_to_towers([*self._mirrored])

    def first_copies(self) -> contextlib.AbstractContextManager[None]:
        """Make variables resolve to the first tower's copy in this block."""
        return with_values(
            (v, copy_on_tower(v._value, 0)) for v in self._mirrored
        )

    def on_towers(
        self, captures: Sequence[tf.Tensor], alone: bool = False
    ) -> dict[int, TowerHandles]:
        """Return the handles of captures of which towers have a copy or rows.

        Args:
            captures: what a trace captures. A variable's first handle stands
                for all of its handles.
            alone: whether this is for a step without other ranks, which takes
                the wholes that this rank holds of what ranks divide.

        Returns:
            The handles, by the capture's index.
        """
        in_shards = {}
        for variable in self._moved:
            value = variable._value
            if isinstance(value, ShardedVariable) and not (
                alone and value.is_remote
            ):
                in_shards[id(value.handle)] = value
        handles = {}
        for index, capture in enumerate(captures):
            copies = self.handles_of_copies(capture)
            value = in_shards.get(id(capture))
            if value is not None:
                handles[index] = TowerHandles(value.layout, value.handles)
            elif copies:
                of_copies = [[handle] for handle in copies]
                handles[index] = TowerHandles(MeshLayout(MIRRORED), of_copies)
        return handles

    def handles_of_copies(self, handle: tf.Tensor) -> list[tf.Tensor]:
        """Return the handles of a variable's copies, given the first one.

        Of any variable with copies, such as a ``tf.Variable`` of the block;
        an empty list if it has none, or if they may differ.
        """
        container = getattr(handle, "_distributed_container", None)
        variable: Variable = container and container()
        is_one = (
            is_copied(variable)
            and variable.distribute_strategy is self._config.strategy
            and not isinstance(variable, compat.SyncOnReadVariable)
        )
        if not is_one or variable.values[0].handle is not handle:
            return []
        return [copy.handle for copy in variable.values]

    def restore(self, variable: keras.Variable) -> None:
        """Put a variable back on its original device, with its new value."""
        if variable in self._moved:
            self._put_back(variable, *self._moved[variable])
        value = variable._value
        strategy = self._config.strategy
        if is_copied(value) and value.distribute_strategy is strategy:
            variable._value = unbind(value, self.has_parts, self.asks_ranks)
        for placed in (self._moved, self._mirrored, self._of_replicas):
            placed.pop(variable, None)

    def _put_back(
        self, variable: keras.Variable, original: tf.Variable, device: str
    ) -> None:
        """Give a moved variable its new value, on its original device."""
        value, named = variable._value, weakref.ref(variable)

        def restore(whole: tf.Tensor) -> tf.Variable:
            if isinstance(value, ShardedVariable):
                self.access.known.forget([value.place])
            if original is not value:
                overwrite(original, whole)
            ordinary = copy_to_device(original, device)
            owner = named()
            if owner is not None:
                owner._value = ordinary
            return ordinary

        if not isinstance(value, ShardedVariable):
            restore(value.read_value())
        elif not value.is_remote:
            restore(value.read_value())
            # A graph keeps the shape of what is assigned.
            if tf.executing_eagerly():
                value.free()
        elif self.asks_ranks:
            value.leave_block(restore)
            self.access.known.keep(value, named)
        else:
            value.is_lost = True

    def restore_all(self) -> None:
        """Put every variable back, even if some fail."""
        with contextlib.ExitStack() as stack:
            for variable in (*self._moved, *self._mirrored):
                stack.callback(self.restore, variable)


def overwrite(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assign a value of any shape."""
    with tf.device(variable.device):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
