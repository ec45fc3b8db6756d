"""Updating one rank's share of the weights, and getting the others'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.context import patches
from keras_towers.fit.update.shares import Shares
from keras_towers.transport import Transport, next_key
from keras_towers.transport.forms import packed

_HOST = "CPU:0"


class UpdatesOfRank:
    """What an optimizer does otherwise that updates one rank's weights only.

    Its update rule sees these alone. The new values of all weights are there
    before constraints and moving averages are computed from them.

    Args:
        transport: connects the ranks.
        shares: who updates which weight.
    """

    def __init__(self, transport: Transport, shares: Shares):
        self._transport = transport
        self._shares = shares

    def shadows(self) -> patches.Shadows:
        """Return replacements for methods of the optimizer."""
        return {
            "_apply_weight_decay": self._apply_weight_decay,
            "_backend_update_step": self._update_step,
        }

    def slot_device(self, weight: tf.Variable) -> str:
        """Return the device on which to create slots of a weight."""
        return weight.device if self._is_mine(weight) else _HOST

    def _is_mine(self, weight: Any) -> bool:
        value = getattr(weight, "_value", weight)
        return self._shares.rank_of(value) == self._transport.rank

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
            theirs = [w for w in weights if self._shares.rank_of(w) == rank]

            def send(tensor: tf.Tensor, key: str, rank: int = rank) -> Any:
                return self._transport.broadcast([tensor], key, rank)[0]

            values = [weight.read_value() for weight in theirs]
            sent = packed(values, send, next_key("weights"))
            for weight, value in zip(theirs, sent, strict=True):
                with tf.device(weight.device):
                    weight.assign(value, read_value=False)
