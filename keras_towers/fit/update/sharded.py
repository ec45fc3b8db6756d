"""Weights that the towers update in shares, each with its optimizer's state.

Ports the first stage of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations
toward training trillion parameter models", SC 2020), with whole weights as the
unit. Keras's ``apply`` still runs once on every rank for all of them, so its
treatment of all gradients together (clipping by their global norm, loss
scaling) needs no special handling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.context import patches
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import TowerConfig, UpdateCall
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.fit.update.step_order import done_by_all
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.model_state import optimizers_in
from keras_towers.fit.weights.relocated import (
    RelocatedVariables,
    SlotsSharedByRanks,
)
from keras_towers.fit.weights.tower_variables import component
from keras_towers.placement import LeastLoadedPlacement, byte_size
from keras_towers.reduction import (
    Gradient,
    Gradients,
    Reduction,
    sum_at_variables,
)
from keras_towers.transport import next_key
from keras_towers.transport.messages import packed

logger: logging.Logger = logging.getLogger("keras_towers")

_HOST = "CPU:0"


class UpdateSharded(UpdateOnce):
    """Each tower of each rank updates its share of the weights.

    The other towers copy the result. Slots of a weight are on the tower that
    updates it. While steps run, other ranks do not have slots of its update
    rule, but moving averages and accumulated gradients, which Keras computes
    from values that all ranks have. Without a ``reduction`` a gradient is
    summed on the tower that updates its weight.
    """

    name = "sharded"
    description = "each tower updates its share of the weights"
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
        self._shares = Shares(config)
        self._slots = RelocatedVariables()
        self._of_ranks = SlotsSharedByRanks(config.transport)
        if config.transport.size > 1:
            self._only = self._shares
        self.updater = self._shares.tower_of
        self.sums_at_weights = reduction is None
        self._slot_bytes_before: list[int] = []

    @staticmethod
    def _mirrors(config: TowerConfig) -> bool:
        return True

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer with its slots where they belong."""
        self._shares.add(variables)
        super().make_ready(optimizer, variables)
        for part in optimizers_in(optimizer):
            self._of_ranks.make_ready(part.variables)

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Put slots on the towers that update their weights."""
        super().place_optimizer(optimizer)
        # A wrapper has the slots of what it wraps, and knows less of them.
        placed: set[int] = set()
        for part in reversed(list(optimizers_in(optimizer))):
            if part.built:
                self._shares.add(part._trainable_variables)
                self._place_slots(part, placed)

    def _place_slots(
        self, optimizer: keras.optimizers.Optimizer, placed: set[int]
    ) -> None:
        if self._only is not None:
            state_lib.check_known(optimizer)
        of_rule = {id(slot) for slot in state_lib.of_update_rule(optimizer)}
        for slot, weight in state_lib.slots_of(optimizer):
            value = getattr(weight, "_value", weight)
            if id(slot) in placed or value not in self._shares:
                continue
            placed.add(id(slot))
            home = component(value).device
            rank = self._shares.rank_of(value)
            if self._only is not None and id(slot) in of_rule:
                self._of_ranks.add(slot, rank, home)
                if rank != self.config.transport.rank:
                    continue
            here = component(value, self.updater).device
            self._slots.place(slot, here, home)

    @property
    def slot_bytes(self) -> list[int]:
        """The bytes of the slots on each tower, now or in the last block."""
        now = [self._slots.bytes_on(d) for d in self.config.devices]
        return now if any(now) else self._slot_bytes_before

    def drop_slots_of_others(self) -> None:
        self._of_ranks.drop_those_of_others()

    def gather_slots(self) -> None:
        self._of_ranks.gather()

    def restore(self, variable: keras.Variable) -> None:
        self._slots.restore(variable)
        self._of_ranks.restore(variable)
        super().restore(variable)

    def release(self) -> None:
        self._slot_bytes_before = self.slot_bytes
        try:
            self._slots.restore_all()
            absent = self._of_ranks.restore_all()
        finally:
            self._shares.clear()
            super().release()
        if absent:
            logger.warning(
                "training ended by an error while other ranks had %d of the "
                "optimizer's variables, which have no value here now: load "
                "them from a checkpoint, or compile the model anew",
                absent,
            )

    def apply(self, call: UpdateCall) -> None:
        """Sum gradients over all towers; each tower updates its share."""
        if self._only is not None:
            raise TowerError(
                'updates="sharded" trains over several ranks by fit() and '
                "train_on_batch(), which know when the ranks need one "
                "another's part of the optimizer's state. In a loop of your "
                "own leave updates out."
            )
        super().apply(call)

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        # The optimizer may have been built just now.
        self.drop_slots_of_others()
        super()._update(call, rows)

    def _reduce(
        self, rows: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        values = [getattr(v, "_value", v) for v in variables]
        if self._reduction is not None:
            sums = self._reduction(rows, self.config.devices)
            towers = map(self._shares.tower_of, values)
            return [[sums[tower][i] for i, tower in enumerate(towers)]]
        places = [component(v, self.updater).device for v in values]
        sums = sum_at_variables(rows, self.config.devices, places)
        return [self._over_ranks(sums)]


class Shares:
    """Divides weights between all towers of all ranks, large ones first.

    The shares then differ by less than the largest weights do. All ranks come
    to the same result, as they have the same weights in the same order.
    """

    def __init__(self, config: TowerConfig):
        self._towers = config.num_towers
        self._transport = config.transport
        self._places = [
            f"/job:rank/task:{rank}/device:CPU:{tower}"
            for rank in range(config.transport.size)
            for tower in range(config.num_towers)
        ]
        self._placement = LeastLoadedPlacement(self._places)
        # By the value of the weight, and by its component on that tower.
        self._owners: ByIdentity[Any, int] = ByIdentity()

    def add(self, variables: Sequence[Any]) -> None:
        """Choose a tower for those weights that no tower updates yet."""
        new = [
            v
            for v in variables
            if isinstance(v, keras.Variable)
            and self._is_placed(v._value)
            and v._value not in self._owners
        ]
        for v in sorted(new, key=_bytes, reverse=True):
            place = self._placement(v.path, v.shape, v.dtype)
            self._owners[v._value] = self._places.index(place)
            mine = component(v._value, self.tower_of)
            self._owners[mine] = self._owners[v._value]

    def _is_placed(self, value: Any) -> bool:
        """Whether a weight has its copies on the towers already."""
        copied = isinstance(value, compat.DistributedVariable)
        return copied or self._towers == 1

    def __contains__(self, value: Any) -> bool:
        return value in self._owners

    def tower_of(self, value: Any) -> int:
        """Return the tower of this rank that has the new value of a weight."""
        return self._owners.get(value, 0) % self._towers

    def rank_of(self, value: Any) -> int:
        """Return the rank that updates a weight."""
        return self._owners.get(value, 0) // self._towers

    def clear(self) -> None:
        """Forget all weights."""
        self._owners.clear()
        self._placement.clear()

    def shadows(self) -> patches.Shadows:
        """Return methods of an optimizer that update this rank's share.

        Its update rule sees these weights alone. The new values of all are
        there before constraints and moving averages are computed from them.
        """
        return {
            "_apply_weight_decay": self._apply_weight_decay,
            "_backend_update_step": self._update_step,
        }

    def slot_device(self, weight: tf.Variable) -> str:
        """Return the device on which to create slots of a weight."""
        return weight.device if self._is_mine(weight) else _HOST

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
        mine = [self._is_mine(weight) for weight in weights]
        original(
            [g for g, here in zip(gradients, mine, strict=True) if here],
            [w for w, here in zip(weights, mine, strict=True) if here],
            learning_rate,
        )
        # Every rank has to take part in the sums that others use.
        sums = tf.nest.flatten(list(gradients), expand_composites=True)
        with tf.control_dependencies(done_by_all(sums)):
            self._exchange([getattr(w, "_value", w) for w in weights])

    def _exchange(self, weights: Sequence[tf.Variable]) -> None:
        """Give all ranks the new values."""
        for rank in range(self._transport.size):
            theirs = [w for w in weights if self.rank_of(w) == rank]

            def send(tensors: list[tf.Tensor], rank: int = rank) -> Any:
                return self._transport.broadcast(
                    tensors, next_key("weights"), rank
                )

            sent = packed([weight.read_value() for weight in theirs], send)
            for weight, value in zip(theirs, sent, strict=True):
                with tf.device(weight.device):
                    weight.assign(value, read_value=False)


def _bytes(variable: keras.Variable) -> int:
    return byte_size(variable.shape, variable.dtype) or 0
