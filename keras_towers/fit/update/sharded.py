"""Sharded updates: each tower updates a share of the weights.

Ports the first stage of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations
toward training trillion parameter models", SC 2020), with whole weights as the
unit. Keras's ``apply`` still runs once on every rank for all of them, so its
treatment of all gradients together (clipping by their global norm, loss
scaling) needs no special handling.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.devices import same_device
from keras_towers.errors import TowerError
from keras_towers.fit.context import patches
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.contract import TowerConfig, UpdateCall
from keras_towers.fit.step.step_order import done_by_all
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.model_state import optimizers_in, slots_of
from keras_towers.fit.weights.placement import LeastLoadedPlacement, byte_size
from keras_towers.fit.weights.tower_variables import (
    copy_on_tower,
    is_copied,
    native,
    overwrite,
    update_on,
)
from keras_towers.reduction import Gradient, Gradients, Reduction
from keras_towers.transport import next_key
from keras_towers.transport.messages import buckets, send_packed

logger: logging.Logger = logging.getLogger("keras_towers")

# Ranks gather this many bytes at a time, which takes three times the memory.
_GATHERED_BYTES = 64 * 2**20


class UpdateSharded(WeightUpdate):
    """Each tower of each rank updates its share of the weights.

    The other towers copy the result. Slots of a weight are on the tower that
    updates it. While steps run, other ranks do not have the slots of its update
    rule; they do have moving averages and accumulated gradients, which Keras
    computes from values that all ranks have.
    """

    name = "sharded"
    description = "each tower updates its share of the weights"
    mirrors = True

    def __init__(
        self,
        config: TowerConfig,
        over_ranks: Callable[[list[Gradient]], list[Gradient]],
        reduction: Reduction | None = None,
    ):
        super().__init__(config, reduction)
        self._over_ranks = over_ranks
        self._shares = UpdateShares(config)
        # The slots that a single rank needs in steps. All are kept until the
        # end, since ranks have to gather the same ones.
        self._slots: IdentityDict[keras.Variable, _RemoteSlot] = IdentityDict()
        if config.transport.size > 1:
            self._shares_here = self._shares
        self.sums_at_weights = reduction is None
        self._slot_bytes: list[int] = []

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer, with its slots on the right towers."""
        self._shares.add(variables)
        super().make_ready(optimizer, variables)
        for part in optimizers_in(optimizer):
            for variable in part.variables:
                if variable in self._slots:
                    self._slots[variable].is_used = True

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Put slots on the towers that update their weights."""
        super().place_optimizer(optimizer)
        for part in optimizers_in(optimizer):
            if part.built:
                self._shares.add(part._trainable_variables)
                self._place_slots(part)
        here = [
            slot
            for slot in self.variables.moved
            if slot not in self._slots
            or self._slots[slot].rank == self.config.transport.rank
        ]
        if here:
            self._slot_bytes = [
                sum(
                    byte_size(s)
                    for s in here
                    if same_device(s._value.device, d)
                )
                for d in self.config.devices
            ]

    def held_bytes(self) -> dict[str, list[int]]:
        sizes = self._slot_bytes
        return {"optimizer state": sizes} if sizes else {}

    def _place_slots(self, optimizer: keras.optimizers.Optimizer) -> None:
        remote: set[int] = set()
        if self._shares_here is not None:
            remote = _slots_of_rule(optimizer)
        for slot, weight in slots_of(optimizer):
            value = native(weight)
            if value not in self._shares:
                continue
            device = copy_on_tower(value).device
            if id(slot) in remote:
                device = self._shares.slot_device(value)
                if slot not in self._slots:
                    rank = self._shares.rank_of(value)
                    self._slots[slot] = _RemoteSlot(slot, rank)
            back_to = copy_on_tower(value, 0).device
            self.variables.move(slot, device, back_to, empties=True)

    def drop_remote_slots(self) -> None:
        """Drop the values that other ranks need in steps."""
        for slot in self._slots.values():
            if slot.is_used and not slot.is_on_owner_only:
                slot.is_on_owner_only = True
                if slot.rank != self.config.transport.rank:
                    slot.drop()

    def gather_slots(self) -> None:
        """Give all ranks the values of all slots. Collective."""
        transport = self.config.transport
        for rank in range(transport.size):
            owned = [
                slot
                for slot in self._slots.values()
                if slot.rank == rank and slot.is_on_owner_only
            ]
            for indices in buckets([s.held for s in owned], _GATHERED_BYTES):
                slots = [owned[i] for i in indices]
                values = transport.broadcast(
                    [slot.sent() for slot in slots], next_key("slots"), rank
                )
                if rank != transport.rank:
                    for slot, value in zip(slots, values, strict=True):
                        slot.put_back(value)
        for slot in self._slots.values():
            slot.is_on_owner_only = False

    def restore(self, variable: keras.Variable) -> None:
        self._forget(variable)
        super().restore(variable)

    def release(self) -> None:
        lost = [slot for slot in [*self._slots] if self._forget(slot)]
        self._shares.clear()
        super().release()
        if lost:
            logger.warning(
                "training failed while other ranks held %d of the "
                "optimizer's variables, which have no value on this "
                "rank: load them from a checkpoint, or compile the model again",
                len(lost),
            )

    def _forget(self, variable: keras.Variable) -> bool:
        """Forget a slot variable; return whether its value is lost."""
        slot = self._slots.pop(variable, None)
        if slot is None or variable._value is not slot:
            return False
        slot.held = self.variables.pop_original(variable)
        slot.is_lost = True
        return True

    def apply_in_replica(self, call: UpdateCall) -> None:
        """Sum gradients over all towers; each tower updates its share."""
        if self._shares_here is not None:
            raise TowerError(
                'updates="sharded" works over several ranks only with fit() '
                "and train_on_batch(): leave updates out in a custom "
                "training loop."
            )
        super().apply_in_replica(call)

    def _apply_update(self, call: UpdateCall, tower_grads: Gradients) -> None:
        # The optimizer may have been built in this step.
        self.drop_remote_slots()
        super()._apply_update(call, tower_grads)

    def _reduce(
        self, tower_grads: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        sums = super()._reduce(tower_grads, variables)
        values = list(map(native, variables))
        towers = map(self._shares.tower_of, values)
        here = [sums[tower][i] for i, tower in enumerate(towers)]
        return [self._over_ranks(here) if self.sums_at_weights else here]


def _slots_of_rule(optimizer: keras.optimizers.Optimizer) -> set[int]:
    """Return the ids of the slots that only their weights' updates use.

    Raises:
        TowerError: a variable of the optimizer belongs to no known weight.
    """
    of_weights = {id(slot) for slot, _ in slots_of(optimizer)}
    # Optimizers with any update rule may have these.
    generic = {
        id(slot)
        for name in (
            "_model_variables_moving_average",
            "_accumulated_gradients",
        )
        for slot in getattr(optimizer, name, ())
    }
    numbers = {id(optimizer._iterations), id(optimizer._learning_rate)}
    known = of_weights | generic | numbers
    others = [v.path for v in optimizer.variables if id(v) not in known]
    if others and not type(optimizer).__module__.startswith("keras."):
        raise TowerError(
            f"optimizer {type(optimizer).__name__} has the variable "
            f"{others[0]!r}, which cannot be assigned to a weight, "
            'so updates="sharded" cannot share it between ranks: keep '
            "such variables in lists with one variable per weight, as "
            "Keras's optimizers do, or leave updates out."
        )
    return of_weights - generic


class OnAnotherRankError(TowerError, AttributeError):
    """The value of a variable is on another rank."""


class _RemoteSlot:
    """A slot variable that only one rank needs in steps.

    On the other ranks it replaces the variable's value while steps run. Reading
    it there raises an error that says which rank has the value.

    Attributes:
        variable: the slot variable.
        rank: the rank that needs it.
        held: the ``tf.Variable`` that has the value, or had it.
        is_used: whether steps use it. Before that, all ranks have rank 0's
            value, which may be loaded from a file.
        is_on_owner_only: whether only ``rank`` has the value.
        is_lost: whether training has ended without the value.
    """

    def __init__(self, variable: keras.Variable, rank: int):
        self.variable = variable
        self.rank = rank
        self.held = variable._value
        if self.is_absent:
            # The value was lost in an earlier block.
            self.held = variable._value.held
        self.is_used = self.is_on_owner_only = self.is_lost = False

    @property
    def is_absent(self) -> bool:
        """Whether this process does not have the value."""
        return isinstance(self.variable._value, _RemoteSlot)

    def drop(self) -> None:
        """Free the memory of the value, if it is here."""
        if self.is_absent or not byte_size(self.variable):
            return
        with tf.init_scope():
            self.held, self.variable._value = self.variable._value, self
            overwrite(self.held, tf.zeros([0], self.held.dtype))

    def put_back(self, value: Any) -> None:
        """Give the slot variable a value again."""
        if not self.is_absent:
            self.held = self.variable._value
        overwrite(self.held, value)
        self.variable._value = self.held

    def sent(self) -> tf.Tensor:
        """Return the value for a broadcast; a placeholder if it is absent."""
        with tf.device(compat.HOST):
            if self.is_absent:
                return tf.zeros(self.held.shape, self.held.dtype)
            return tf.identity(self.variable._value.read_value())

    def assign(self, value: Any, **kwargs: Any) -> Any:
        """Accept a value, if training is over."""
        if not self.is_lost:
            self._refuse()
        self.put_back(tf.cast(value, self.held.dtype))
        return self.held

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "name", "device", "_unique_id"):
            return getattr(self.held, name)
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse()

    def __tf_tensor__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        path = self.variable.path
        if self.is_lost:
            raise OnAnotherRankError(
                f"optimizer variable {path!r} has no value: rank {self.rank} "
                "had it when training ended with an error. Load the "
                "optimizer's state from a checkpoint, or compile the model "
                "again."
            )
        raise OnAnotherRankError(
            f"optimizer variable {path!r} cannot be read or written between "
            f'two steps: with updates="sharded" rank {self.rank} has it. All '
            "ranks have it from the end of an epoch to the beginning of the "
            "next one, after evaluate(), and when the strategy's block ends. "
            'Save then (for Keras\'s callbacks: save_freq="epoch"), or leave '
            "updates out."
        )


class UpdateShares:
    """Divides weights between all towers of all ranks, large ones first.

    The sizes of two shares differ by at most the size of the largest weight.
    All ranks compute the same result from the same weights in the same order.
    """

    def __init__(self, config: TowerConfig):
        self._towers = config.num_towers
        self._transport = config.transport
        self.clear()

    def clear(self) -> None:
        """Forget all weights."""
        # The global index of the tower that updates a weight, by its value.
        self._owners: IdentityDict[Any, int] = IdentityDict()
        towers = range(self._towers * self._transport.size)
        self._next = LeastLoadedPlacement(map(str, towers))

    def add(self, variables: Sequence[Any]) -> None:
        """Choose a tower for each weight that no tower updates yet."""
        new = [
            v
            for v in variables
            if isinstance(v, keras.Variable)
            # Copied to the towers, if there are several.
            and (self._towers == 1 or is_copied(v._value))
            and v._value not in self._owners
        ]
        for v in sorted(new, key=byte_size, reverse=True):
            owner = int(self._next(v))
            if is_copied(v._value):
                update_on(v._value, owner % self._towers)
            for value in (v._value, copy_on_tower(v._value)):
                self._owners[value] = owner

    def __contains__(self, value: Any) -> bool:
        return value in self._owners

    def tower_of(self, value: Any) -> int:
        """Return the local tower that has the new value of a weight."""
        return self._owners.get(value, 0) % self._towers

    def rank_of(self, value: Any) -> int:
        """Return the rank that updates a weight."""
        return self._owners.get(value, 0) // self._towers

    def shadows(self) -> patches.Shadows:
        """Return methods of an optimizer that update this rank's share.

        The update rule sees only these weights. All ranks have all new values
        before constraints and moving averages are computed from them.
        """
        return {
            "_apply_weight_decay": self._apply_weight_decay,
            "_backend_update_step": self._update_step,
        }

    def slot_device(self, value: Any) -> str:
        """Return the device of a weight's slots, given the weight's value."""
        return (
            copy_on_tower(value).device if self._is_mine(value) else compat.HOST
        )

    def _is_mine(self, weight: Any) -> bool:
        value = native(weight)
        return self.rank_of(value) == self._transport.rank

    def _apply_weight_decay(
        self,
        optimizer: Any,
        original: Callable[..., None],
        weights: Sequence[Any],
    ) -> None:
        original([weight for weight in weights if self._is_mine(weight)])

    def _update_step(
        self,
        optimizer: Any,
        original: Callable[..., None],
        gradients: Sequence[Any],
        weights: Sequence[Any],
        learning_rate: Any,
    ) -> None:
        is_mine = list(map(self._is_mine, weights))
        original(
            list(itertools.compress(gradients, is_mine)),
            list(itertools.compress(weights, is_mine)),
            learning_rate,
        )
        # A rank takes part even in sums that only other ranks use.
        sums = tf.nest.flatten(list(gradients), expand_composites=True)
        with tf.control_dependencies(done_by_all(sums)):
            self._exchange(list(map(native, weights)))

    def _exchange(self, weights: Sequence[tf.Variable]) -> None:
        """Send the new values to all ranks."""
        for rank in range(self._transport.size):
            owned = [w for w in weights if self.rank_of(w) == rank]

            def send(tensors: list[tf.Tensor], rank: int = rank) -> Any:
                return self._transport.broadcast(
                    tensors, next_key("weights"), rank
                )

            sent = send_packed([weight.read_value() for weight in owned], send)
            for weight, value in zip(owned, sent, strict=True):
                with tf.device(weight.device):
                    weight.assign(value, read_value=False)
