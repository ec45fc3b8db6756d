"""Which tower of which rank updates each weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights.variables import TowerVariable, component
from keras_towers.placement import LeastLoadedPlacement, byte_size


class Shares:
    """Divides weights between all towers of all ranks, large ones first.

    The shares then differ by less than the largest weights do. All ranks come
    to the same result, as they have the same weights in the same order.

    Args:
        config: the towers.
    """

    def __init__(self, config: TowerConfig):
        self._towers = config.num_towers
        self._places = [
            f"/job:rank/task:{rank}/device:CPU:{tower}"
            for rank in range(config.transport.size)
            for tower in range(config.num_towers)
        ]
        self._placement = LeastLoadedPlacement(self._places)
        # By the value of the weight, and by its component on that tower.
        self._owners: ByIdentity[Any, int] = ByIdentity()

    def add(self, variables: Sequence[Any]) -> None:
        """Choose who updates those weights that nobody updates yet.

        Args:
            variables: Keras variables; those not on the towers are left out.
        """
        new = [
            v
            for v in variables
            if isinstance(v, keras.Variable)
            and isinstance(v._value, TowerVariable)
            and v._value not in self._owners
        ]
        for v in sorted(new, key=_bytes, reverse=True):
            place = self._placement(v.path, v.shape, v.dtype)
            self._owners[v._value] = self._places.index(place)
            mine = component(v._value, self.tower_of)
            self._owners[mine] = self._owners[v._value]

    def __contains__(self, value: Any) -> bool:
        return value in self._owners

    def tower_of(self, value: Any) -> int:
        """Return the tower that updates a weight, given by its ``_value``.

        Where another rank does, the tower of this one that gets the result.
        """
        return self._owners.get(value, 0) % self._towers

    def rank_of(self, value: Any) -> int:
        """Return the rank that updates a weight."""
        return self._owners.get(value, 0) // self._towers

    def clear(self) -> None:
        """Forget all weights."""
        self._owners.clear()
        self._placement.clear()


def _bytes(variable: keras.Variable) -> int:
    return byte_size(variable.shape, variable.dtype) or 0
