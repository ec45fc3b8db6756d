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

from keras_towers.errors import TowerError
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig, UpdateCall
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.fit.update.shares import Shares
from keras_towers.fit.weights import slots as slots_lib
from keras_towers.fit.weights.elsewhere import SlotsOverRanks
from keras_towers.fit.weights.moved import MovedVariables
from keras_towers.fit.weights.state import optimizers_in
from keras_towers.fit.weights.variables import component
from keras_towers.reduction import (
    Gradient,
    Gradients,
    Reduction,
    sum_at_variables,
)

logger: logging.Logger = logging.getLogger("keras_towers")


class UpdateSharded(UpdateOnce):
    """Each tower of each rank updates its share of the weights."""

    name = "sharded"
    description = "each tower updates its share of the weights"
    # Slots of all weights may be too large for the tower of Keras's build().
    builds_optimizers = True

    # The other towers copy the result. Slots of a weight are on the tower that
    # updates it. While steps run, other ranks do not have slots of its update
    # rule, but moving averages and accumulated gradients, which Keras computes
    # from values that all ranks have. Without a ``reduction`` a gradient is
    # summed on the tower that updates its weight.
    def __init__(
        self,
        config: TowerConfig,
        over_ranks: Callable[[list[Gradient]], list[Gradient]],
        reduction: Reduction | None = None,
    ):
        super().__init__(config, reduction)
        self._over_ranks = over_ranks
        self._shares = Shares(config)
        self._slots = MovedVariables()
        self._of_ranks = SlotsOverRanks(config.transport)
        if config.transport.size > 1:
            self._only = self._shares
        self._updater = self._shares.tower_of
        self.sums_at_weights = reduction is None
        self._slot_bytes_before: list[int] = []

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer with its slots where they belong."""
        self._shares.add(variables)
        super().make_ready(optimizer, variables)
        for part in optimizers_in(optimizer):
            self._of_ranks.make_ready(part.variables)

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Intercept the optimizer's calls; put slots on updating towers."""
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
            slots_lib.check_known(optimizer)
        of_rule = {id(slot) for slot in slots_lib.of_update_rule(optimizer)}
        for slot, weight in slots_lib.slots_of(optimizer):
            value = getattr(weight, "_value", weight)
            if id(slot) in placed or value not in self._shares:
                continue
            placed.add(id(slot))
            home = value.values[0].device
            rank = self._shares.rank_of(value)
            if self._only is not None and id(slot) in of_rule:
                self._of_ranks.add(slot, rank, home)
                if rank != self.config.transport.rank:
                    continue
            here = component(value, self._updater).device
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

    def take_back(self, variable: keras.Variable) -> bool:
        mine = self._slots.give_back(variable)
        return self._of_ranks.give_back(variable) or mine

    def release(self) -> None:
        self._slot_bytes_before = self.slot_bytes
        try:
            self._slots.give_all_back()
            absent = self._of_ranks.give_all_back()
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
        if self._only is not None and tower_lib.current() is None:
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
        places = [component(v, self._updater).device for v in values]
        sums = sum_at_variables(rows, self.config.devices, places)
        return [self._over_ranks(sums)]
