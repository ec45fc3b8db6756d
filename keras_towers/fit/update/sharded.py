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
from typing import Any

import keras
import tensorflow as tf

from keras_towers.devices import same_device
from keras_towers.errors import TowerError
from keras_towers.fit.context import patches
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.contract import TowerConfig, UpdateCall
from keras_towers.fit.step.step_order import done_by_all
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.model_state import optimizers_in
from keras_towers.fit.weights.placement import LeastLoadedPlacement, byte_size
from keras_towers.fit.weights.remote_slots import RemoteSlots
from keras_towers.fit.weights.tower_variables import (
    copy_on_tower,
    is_copied,
    update_on,
)
from keras_towers.reduction import (
    Gradient,
    Gradients,
    Reduction,
)
from keras_towers.transport import next_key
from keras_towers.transport.messages import send_packed

logger: logging.Logger = logging.getLogger("keras_towers")

_HOST = "CPU:0"


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
    # Slots of all weights may be too large for the tower of Keras's build().
    builds_optimizers = True

    def __init__(
        self,
        config: TowerConfig,
        over_ranks: Callable[[list[Gradient]], list[Gradient]],
        reduction: Reduction | None = None,
    ):
        super().__init__(config, reduction)
        self._over_ranks = over_ranks
        self._shares = UpdateShares(config)
        self._slots = RemoteSlots(config.transport, self.variables)
        if config.transport.size > 1:
            self._shares_here = self._shares
        self.sums_at_weights = reduction is None
        # The bytes of the slots on each tower, in this or the previous block.
        self.slot_bytes: list[int] = []

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer, with its slots on the right towers."""
        self._shares.add(variables)
        super().make_ready(optimizer, variables)
        for part in optimizers_in(optimizer):
            self._slots.use(part.variables)

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Put slots on the towers that update their weights."""
        super().place_optimizer(optimizer)
        for part in optimizers_in(optimizer):
            if part.built:
                self._shares.add(part._trainable_variables)
                self._place_slots(part)
        here = [s for s in self.variables.moved if self._slots.has_here(s)]
        if here:
            self.slot_bytes = [
                sum(
                    byte_size(s)
                    for s in here
                    if same_device(s._value.device, d)
                )
                for d in self.config.devices
            ]

    def _place_slots(self, optimizer: keras.optimizers.Optimizer) -> None:
        of_rule: set[int] = set()
        if self._shares_here is not None:
            state_lib.check_known(optimizer)
            of_rule = set(map(id, state_lib.rule_slots(optimizer)))
        for slot, weight in state_lib.slots_of(optimizer):
            value = getattr(weight, "_value", weight)
            if value not in self._shares:
                continue
            device = copy_on_tower(value).device
            if id(slot) in of_rule:
                self._slots.add(slot, self._shares.rank_of(value))
                device = self._shares.slot_device(value)
            back_to = copy_on_tower(value, 0).device
            self.variables.move(slot, device, back_to, empties=True)

    def drop_remote_slots(self) -> None:
        self._slots.drop_remote_slots()

    def gather_slots(self) -> None:
        self._slots.gather()

    def restore(self, variable: keras.Variable) -> None:
        self._slots.forget(variable)
        super().restore(variable)

    def release(self) -> None:
        lost = self._slots.forget_all()
        self._shares.clear()
        super().release()
        if lost:
            logger.warning(
                "training failed while other ranks held %d of the "
                "optimizer's variables, which have no value on this "
                "rank: load them from a checkpoint, or compile the model again",
                lost,
            )

    def apply_in_replica(self, call: UpdateCall) -> None:
        """Sum gradients over all towers; each tower updates its share."""
        if self._shares_here is not None:
            raise TowerError(
                'updates="sharded" works over several ranks only with fit() '
                "and train_on_batch(): leave updates out in a custom "
                "training loop."
            )
        super().apply_in_replica(call)

    def _update(self, call: UpdateCall, tower_grads: Gradients) -> None:
        # The optimizer may have been built in this step.
        self.drop_remote_slots()
        super()._update(call, tower_grads)

    def _reduce(
        self, tower_grads: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        sums = super()._reduce(tower_grads, variables)
        values = [getattr(v, "_value", v) for v in variables]
        towers = map(self._shares.tower_of, values)
        here = [sums[tower][i] for i, tower in enumerate(towers)]
        return [self._over_ranks(here) if self.sums_at_weights else here]


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
        return copy_on_tower(value).device if self._is_mine(value) else _HOST

    def _is_mine(self, weight: Any) -> bool:
        value = getattr(weight, "_value", weight)
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
            self._exchange([getattr(w, "_value", w) for w in weights])

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
