"""Shares of the weights: each is updated by one tower of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.context import patches
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights.variables import TowerVariable, component
from keras_towers.placement import LeastLoadedPlacement, byte_size
from keras_towers.transport import next_key
from keras_towers.transport.messages import packed

_HOST = "CPU:0"


class Shares:
    """Divides weights between all towers of all ranks, large ones first."""

    # The shares then differ by less than the largest weights do. All ranks come
    # to the same result, as they have the same weights in the same order.

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
        """Return methods of an optimizer that update this rank's share."""
        # Its update rule sees these weights alone. The new values of all are
        # there before constraints and moving averages are computed from them.
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
        # TensorFlow prunes what is unused, but every rank has to take part in
        # the sums that others use.
        used = tf.nest.flatten(list(gradients), expand_composites=True)
        with tf.control_dependencies(used):
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
