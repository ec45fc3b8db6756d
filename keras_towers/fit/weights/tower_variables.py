"""Where each variable is: its home (once, mirrored, in shards, moved).

``TowerVariables`` places variables, and puts them back at the end of a block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.weights.copies import (
    copies_of,
    copy_on_tower,
    copy_to_towers,
    is_copied,
    mark_copies,
    native,
)
from keras_towers.fit.weights.joint_access import JointAccess
from keras_towers.fit.weights.mirrored_variable import TowerMirroredVariable
from keras_towers.fit.weights.model_state import slots_of
from keras_towers.fit.weights.moved_variable import move, move_back
from keras_towers.fit.weights.shards import (
    ShardedVariable,
    current_value,
    part_of,
    spans_ranks,
)
from keras_towers.fit.weights.without_memory import is_deferred
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import Variable
from keras_towers.foundation.system import return_freed_memory
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.partition.ir.layouts import MIRRORED, MeshLayout, Replicated
from keras_towers.transport import devices
from keras_towers.transport.devices import same_device

_SUM = tf.VariableAggregation.SUM


def copy_to_device(variable: tf.Variable, device: str) -> tf.Variable:
    """Return a variable if it is on a device, else a copy on the device."""
    if same_device(variable.device, device):
        return variable
    value = variable.read_value()
    with compat.single_device_mode(), tf.device(device):
        copy: Any = tf.Variable(
            value,
            dtype=variable.dtype,
            shape=variable.shape,
            trainable=variable.trainable,
            # Optimizers may have rules that depend on names.
            name=variable.name.split(":")[0],
        )
    copy._unique_id = variable._unique_id
    return copy


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
    for copy in variable.values:
        for holder in (copy, getattr(copy, "handle", copy)):
            if hasattr(holder, "_distributed_container"):
                del holder._distributed_container
    return primary


def bind(variable: Variable, rank: int) -> None:
    """Give all devices the first device's value; undoes ``unbind``.

    With the aggregation ``SUM``, the first device of rank 0 gets the value, and
    all others get 0.
    """
    primary, *others = variable.values
    mark_copies(variable)
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
    """The handles of a variable in shards: one for each tower and column.

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


ONCE: MeshLayout = MeshLayout()
ON_EACH: MeshLayout = MeshLayout(MIRRORED)


@dataclasses.dataclass(eq=False)
class Home:
    """Where a Keras variable is now, and where it was before.

    Attributes:
        layout: whether towers have it once, each has a copy, or each has its
            part.
        device: the only device that has it; empty: those of the layout.
        original: the ``tf.Variable`` that has the value again in the end, to
            which users may hold references; None: the one that has it now.
        back_to: the device that the value goes back to.
        of_replicas: the copies that replicas have of it where towers have it
            once; None: it was not created with any.
        name: what all ranks call it once they have agreed on its value; empty:
            they have not.
    """

    layout: MeshLayout = ONCE
    device: str = ""
    original: tf.Variable | None = None
    back_to: str = ""
    of_replicas: Any = None
    name: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the variable stays there until it is restored."""
        return self.layout.divides or bool(self.device)


class TowerVariables:
    """Places the variables of a strategy's models, and puts them back later.

    Args:
        config: the towers.
        mirrors: whether each tower has its own copy of the weights, as towers
            with separate memories need.
    """

    def __init__(self, config: TowerConfig, mirrors: bool):
        self._config = config
        self.mirrors: bool = mirrors and config.num_towers > 1
        # Whether replicas may have written parts. A single process can always
        # reduce them, since it exchanges nothing.
        self.has_parts: bool = config.job.size == 1
        self.access: JointAccess = JointAccess(config.shards)
        self._homes: IdentityDict[keras.Variable, Home] = IdentityDict()
        self._placement: compat.TracePlacement | None = None
        self._has_moved = False

    @property
    def placement(self) -> compat.TracePlacement | None:
        """Where variables are; None: none has ever moved."""
        if self._has_moved and self._placement is None:
            self._placement = compat.TracePlacement()
        return self._placement

    def _note_move(self) -> None:
        self._has_moved, self._placement = True, None

    @contextlib.contextmanager
    def placing_new(self) -> Iterator[None]:
        """Place variables in this block that nothing has used yet."""
        before = self._has_moved, self._placement
        yield
        self._has_moved, self._placement = before

    def home_of(self, variable: Any) -> Home:
        """Return the home of a variable."""
        return self._homes.get(variable) or Home()

    def register(self, variable: keras.Variable) -> Home:
        """Return the home of a variable, for ``restore_all`` to restore."""
        return self._homes.setdefault(variable, Home())

    def hold_once(self, variable: keras.Variable) -> bool:
        """Keep a single copy of a variable; return whether it had several."""
        # Another block may have left it in shards.
        value = current_value(variable)
        if not is_copied(value) or self.home_of(variable).layout != ONCE:
            return False
        if value.distribute_strategy is not self._config.strategy:
            raise TowerError(
                f"variable {variable.path!r} was created under another "
                "strategy. Build the model outside of any scope, or inside "
                "this one's."
            )
        home = self.register(variable)
        is_new = home.of_replicas is None
        home.of_replicas = value
        variable._value = unbind(value, self.has_parts)
        return is_new

    def unfold_for_replicas(self) -> None:
        """Give replicas copies of variables that had a single one."""
        self.has_parts = True
        for variable, home in self._homes.items():
            value = home.of_replicas
            if value is not None and variable._value is value.values[0]:
                bind(value, self._config.job.rank)
                variable._value = value

    def place(
        self,
        variable: keras.Variable,
        layout: MeshLayout = ONCE,
        device: str = "",
        back_to: str = "",
    ) -> bool:
        """Place a variable; return whether it moved.

        Args:
            variable: the variable.
            layout: how towers have it.
            device: the only device that has it; empty: those of the layout.
            back_to: the device to restore it to; empty: its own.
        """
        moved, home = self.hold_once(variable), self.register(variable)
        is_there = not device and layout in (ONCE, home.layout)
        if is_there or home.is_final:
            return moved
        if home.layout == ON_EACH:
            # Until ranks had agreed on its value.
            self.restore(variable)
            self._homes[variable] = home
        original = variable._value
        if isinstance(original, ShardedVariable):
            # Another block has left it in shards.
            with tf.init_scope(), compat.single_device_mode():
                original = tf.Variable(original)
        # Recorded first, so that a Ctrl-C in between is undone too.
        home.original, home.back_to = original, back_to or original.device
        home.layout, home.device = layout, device
        if device:
            variable._value = copy_to_device(original, device)
        elif layout.divides:
            self._divide(variable, original, home)
        else:
            # The original is the copy of its device.
            variable._value = TowerMirroredVariable(
                self._config.strategy,
                [copy_to_device(original, d) for d in self._config.devices],
                tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        if copy_on_tower(variable._value) is not original:
            # A function may have captured the original.
            self._note_move()
        if not any(copy is original for copy in copies_of(variable)):
            move(original, variable._value)
        return True

    def _divide(self, variable: keras.Variable, value: Any, home: Home) -> None:
        """Divide a variable, and free the value it had before."""
        with tf.init_scope(), tf.device(compat.HOST):
            was_deferred = is_deferred(variable)
            if was_deferred:
                part = value.first_parts()
            else:
                part = functools.partial(part_of, value.read_value())
        access = self.access if self.access.size > 1 else None
        if access is not None:
            access.serve_at_exit()
        mesh = self._config.mesh
        on_host = devices.all_on_host(itertools.chain(*mesh))
        divided = ShardedVariable(
            value,
            part,
            home.layout,
            mesh[:1] if isinstance(home.layout.towers, Replicated) else mesh,
            # Towers share the memory of the host.
            mesh[0][0] if on_host and not self.mirrors else "",
            access,
            home.name,
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

    def original_device(self, variable: Variable) -> str:
        """Return the device to which a variable will be restored."""
        now: str = copy_on_tower(native(variable), 0).device
        return self.home_of(variable).back_to or now

    @property
    def _mirrored(self) -> Sequence[keras.Variable]:
        """The variables with a copy on every tower."""
        return [v for v, h in self._homes.items() if h.layout == ON_EACH]

    def copy_first(self) -> None:
        """Copy the first tower's values of mirrored variables to the others."""
        copy_to_towers(self._mirrored)

    def first_copies(self) -> contextlib.AbstractContextManager[None]:
        """Make variables resolve to the first tower's copy in this block."""
        return with_values(
            (v, copy_on_tower(v._value, 0)) for v in self._mirrored
        )

    def on_towers(
        self, captures: Sequence[tf.Tensor], alone: bool = False
    ) -> dict[int, TowerHandles]:
        """Return the towers' handles of captures with copies or shards.

        Args:
            captures: what a trace captures. A variable's first handle stands
                for all of its handles.
            alone: whether this is for a step without other ranks, which takes
                the wholes that this rank holds of what ranks divide.

        Returns:
            The handles, by the capture's index.
        """
        in_shards = {}
        for variable in self._homes:
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
                handles[index] = TowerHandles(ON_EACH, of_copies)
        return handles

    def handles_of_copies(self, handle: tf.Tensor) -> list[tf.Tensor]:
        """Return the handles of a variable's copies, given the first one.

        Also for variables outside of models, such as a ``tf.Variable`` of the
        block; empty if it has no copies, or if they may differ.
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

    # ---- what ranks call variables of which each has rows --------------------

    def may_divide(self, variable: Any) -> bool:
        """Whether ranks have agreed on a variable that they will divide."""
        return self.access.size == 1 or bool(self.home_of(variable).name)

    def name_weights(self, weights: Sequence[keras.Variable]) -> None:
        """Name weights, whose values ranks have agreed on, by their order."""
        for index, weight in enumerate(weights):
            home = self.register(weight)
            home.name = home.name or f"{self.access.known.agreements}.{index}"

    def name_slots(self, optimizers: Sequence[Any]) -> None:
        """Name slots, once ranks have agreed on their values."""
        for optimizer in optimizers:
            for slot, weight in slots_of(optimizer) if optimizer.built else ():
                self.name_slot(slot, weight)

    def name_slot(self, slot: keras.Variable, weight: Any) -> None:
        """Name a slot by its weight; its value is the same on all ranks."""
        beside = self.home_of(weight).name
        if beside and not self.home_of(slot).name:
            self.name(slot, f" of {beside}")

    def name(self, variable: keras.Variable, of: str = "") -> None:
        """Name a variable that all ranks create now, with one value.

        Args:
            variable: the variable.
            of: tells it from others of its path.
        """
        path = rank_checks.name_in_parent(variable.path)
        name = f"{self.access.known.agreements}: {path}{of}"
        others = [home.name for home in self._homes.values()]
        number = sum(other.startswith(f"{name} (") for other in others)
        self.register(variable).name = f"{name} ({number})"

    # ---- the end of a block --------------------------------------------------

    def restore(
        self, variable: keras.Variable, asks_ranks: bool = True
    ) -> None:
        """Put a variable back on its original device, with its new value.

        Args:
            variable: the variable.
            asks_ranks: whether the other ranks take part. Otherwise what each
                rank has rows of is lost.
        """
        value, home = variable._value, self.home_of(variable)
        strategy = self._config.strategy
        if home.original is not None:
            self._note_move()
        if is_copied(value) and value.distribute_strategy is strategy:
            variable._value = unbind(value, self.has_parts, asks_ranks)
        if home.original is not None:
            self._put_back(variable, home, asks_ranks)
        self._homes.pop(variable, None)

    def _put_back(
        self, variable: keras.Variable, home: Home, asks_ranks: bool
    ) -> None:
        """Give the original variable the new value, on its device."""
        value, named = variable._value, weakref.ref(variable)
        original, back_to = home.original, home.back_to
        assert original is not None

        def restore(whole: tf.Tensor) -> tf.Variable:
            if isinstance(value, ShardedVariable):
                self.access.known.forget([value.place])
            if original is not value:
                move_back(original)
                overwrite(original, whole)
            ordinary = copy_to_device(original, back_to)
            owner = named()
            if owner is not None:
                owner._value = ordinary
            return ordinary

        if not isinstance(value, ShardedVariable):
            ordinary = restore(value.read_value())
            if home.device and ordinary is not value:
                move(value, ordinary)
        elif not value.is_remote:
            whole = value.read_value()
            value.leave_block(restore)
            value.settle(whole)
        elif asks_ranks:
            value.leave_block(restore)
            self.access.known.keep(value, named)
        else:
            value.is_lost = True

    def restore_all(self, asks_ranks: bool = True) -> None:
        """Put every variable back, even if some fail."""
        lost = [] if asks_ranks else [*filter(spans_ranks, self._homes)]
        with contextlib.ExitStack() as stack:
            for variable in self._homes:
                stack.callback(self.restore, variable, asks_ranks)
        if lost:
            logger.warning(
                "training failed while each rank had only its part of %d "
                "variables. They have no value now: load the model from a "
                "checkpoint",
                len(lost),
            )


def overwrite(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assign a value to a variable, also one of another shape."""
    with tf.device(variable.device):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
