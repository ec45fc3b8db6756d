"""Weights that the towers update in shares, each with its optimizer's state.

Ports the first stage of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations
toward training trillion parameter models", SC 2020), with whole weights as the
unit. Keras's ``apply`` still runs once for all of them, so what it does with
all gradients together (clipping by their global norm, loss scaling) needs no
special handling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_towers import compat
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.update.order import StepOrder
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.fit.weights.slots import PlacedSlots, slots_of
from keras_towers.fit.weights.spread import SpreadVariables
from keras_towers.fit.weights.state import optimizers_in
from keras_towers.fit.weights.variables import component
from keras_towers.placement import LeastLoadedPlacement, byte_size
from keras_towers.reduction import (
    Gradient,
    Gradients,
    Reduction,
    sum_at_variables,
)


class UpdateSharded(UpdateOnce):
    """Each tower updates its share of the weights, for the others to copy.

    The slots of a weight are on the tower that updates it.

    Args:
        config: the towers.
        spread: the variables with a component on every tower.
        order: keeps the steps of all ranks in order.
        over_ranks: maps N sums of this process to those of all processes.
        reduction: as for ``UpdateOnce``, instead; None: a gradient is summed on
            the tower that updates its weight.

    Attributes:
        sums_at_weights: whether gradients are summed there.
    """

    name = "sharded"
    description = "each tower updates its share of the weights"
    # Slots of all weights may be too large for the tower of Keras's build().
    builds_optimizers = True

    def __init__(
        self,
        config: TowerConfig,
        spread: SpreadVariables,
        order: StepOrder,
        over_ranks: Callable[[list[Gradient]], list[Gradient]],
        reduction: Reduction | None = None,
    ):
        super().__init__(config, spread, order, reduction)
        self._over_ranks = over_ranks
        self._placement = LeastLoadedPlacement(config.devices)
        self._towers: ByIdentity[Any, int] = ByIdentity()
        self._slots = PlacedSlots()
        self._updater = self._tower_of
        self.sums_at_weights = reduction is None
        self._slot_bytes_before: list[int] = []

    def _tower_of(self, value: Any) -> int:
        """Return the tower that updates a weight, given by its ``_value``."""
        return self._towers.get(value, 0)

    def _share(self, variables: Sequence[Any]) -> None:
        """Choose who updates weights that nobody updates yet, large ones first.

        The towers' shares then differ by less than their largest weights do.
        """
        new = [
            v
            for v in variables
            if isinstance(v, keras.Variable)
            and isinstance(v._value, compat.DistributedVariable)
            and v._value not in self._towers
        ]
        for v in sorted(new, key=_bytes, reverse=True):
            device = self._placement(v.path, v.shape, v.dtype)
            self._towers[v._value] = self._config.devices.index(device)

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer with its slots where they belong."""
        self._share(variables)
        super().make_ready(optimizer, variables)

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Intercept its calls; put slots where their weights are updated."""
        super().place_optimizer(optimizer)
        # A wrapper has the slots of what it wraps, and knows less of them.
        for part in reversed(list(optimizers_in(optimizer))):
            if not part.built:
                continue
            self._share(part._trainable_variables)
            for slot, weight in slots_of(part):
                value = getattr(weight, "_value", weight)
                if value in self._towers:
                    here, first = component(value, self._updater), value.values
                    self._slots.place(slot, here.device, first[0].device)

    @property
    def slot_bytes(self) -> list[int]:
        """The bytes of the slots on each tower, now or in the last block."""
        now = [self._slots.bytes_on(d) for d in self._config.devices]
        return now if any(now) else self._slot_bytes_before

    def take_back(self, variable: keras.Variable) -> bool:
        """Move a slot variable to the first tower again."""
        return self._slots.give_back(variable)

    def release(self) -> None:
        """Move all slot variables to the first tower again."""
        self._slot_bytes_before = self.slot_bytes
        try:
            self._slots.give_all_back()
        finally:
            self._towers.clear()
            self._placement.clear()
            super().release()

    def _reduce(
        self, rows: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        values = [getattr(v, "_value", v) for v in variables]
        if self._reduction is not None:
            sums = self._reduction(rows, self._config.devices)
            return [[sums[self._tower_of(v)][i] for i, v in enumerate(values)]]
        places = [component(v, self._updater).device for v in values]
        sums = sum_at_variables(rows, self._config.devices, places)
        return [self._over_ranks(sums)]


def _bytes(variable: keras.Variable) -> int:
    return byte_size(variable.shape, variable.dtype) or 0
