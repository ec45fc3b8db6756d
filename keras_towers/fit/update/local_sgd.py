"""Local SGD: ranks update their own weights and average them every k updates.

After k updates the ranks average their weights, weighted by the number of
examples that each has seen (McMahan et al., "Communication-Efficient Learning
of Deep Networks from Decentralized Data", 2017). Optionally the mean of the
changes is used as a gradient, from which an outer optimizer with Nesterov
momentum computes the next weights (Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023).
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.contract import ApplyCall, NamedGradients, TowerConfig
from keras_towers.fit.step_order import StepOrder
from keras_towers.fit.weights import tower_variables as variables_lib
from keras_towers.fit.weights.model_state import trained_by
from keras_towers.reduction import RankSum
from keras_towers.rendezvous import rank_checks
from keras_towers.transport import SingleProcess

logger: logging.Logger = logging.getLogger("keras_towers")


class LocalSGD:
    """The rounds of all optimizers, each of a fixed number of updates."""

    def __init__(
        self,
        config: TowerConfig,
        steps: int,
        rank_sum: RankSum,
        learning_rate: float = 1.0,
    ):
        # Orders this rank's local updates, for which no other rank waits.
        self.order: StepOrder = StepOrder(SingleProcess())
        self._config = config
        self._steps = steps
        # Sums changes of weights over the ranks, and adds the momentum of the
        # outer optimizer: with momentum 0 and learning rate 1, the new weights
        # are the weighted mean of the ranks' weights.
        self._rank_sum = rank_sum
        self._learning_rate = learning_rate
        self._share: Any = None
        self._round_of: weakref.WeakKeyDictionary[Any, _Round] = (
            weakref.WeakKeyDictionary()
        )

    def begin_step(self, share: Any) -> None:
        """Record this rank's fraction of the global batch."""
        self._share = share

    def begin_update(self, call: ApplyCall) -> ApplyCall:
        """Record the weights at the beginning of a round.

        Returns:
            The call, which does nothing on a rank without examples.
        """
        optimizer, has_rows = call.optimizer, self._share > 0

        def apply(*args: Any) -> None:
            _act_if(has_rows, lambda: call.original(*args))

        if optimizer not in self._round_of:
            weights = trained_by(optimizer)
            self._round_of[optimizer] = _Round(weights)
        self._round_of[optimizer].note_weights()
        return dataclasses.replace(call, original=apply)

    def end_update(self, optimizer: Any, order: StepOrder) -> None:
        """End the round after its last update."""
        round_ = self._round_of[optimizer]
        round_.shares.assign_add(tf.cast(self._share, tf.float64))
        done = round_.updates.assign_add(1) >= self._steps
        _act_if(done, lambda: self._average(optimizer, order))

    def end_rounds(self, order: StepOrder) -> None:
        """End all rounds that have begun. Collective, eager."""
        numbers = {
            optimizer: int(round_.updates.numpy())
            for optimizer, round_ in self._round_of.items()
        }
        begun = [optimizer for optimizer, number in numbers.items() if number]
        updates_here = [
            f"{numbers[optimizer]} of "
            f"{rank_checks.without_numbers(optimizer.name)!r}"
            for optimizer in begun
        ]
        ranks = rank_checks.gather(
            self._config.job, updates_here, "ends a round"
        )
        if all(rank == updates_here for rank in ranks):
            for optimizer in begun:
                self._average(optimizer, order)
            return
        self.discard_rounds()
        if self._config.job.rank == 0:
            logger.warning(
                "the ranks made different numbers of updates in this round "
                "(%s), for example after an error, or train_on_batch on some "
                "ranks only: their weights are not averaged. fit(), evaluate() "
                "and predict() start with the weights of rank 0.",
                rank_checks.describe_ranks(
                    [", ".join(rank) or "none" for rank in ranks]
                ),
            )

    def discard_rounds(self) -> None:
        """Start over, after an error."""
        for round_ in self._round_of.values():
            round_.reset()

    def _average(self, optimizer: Any, order: StepOrder) -> None:
        """Run the outer step on all ranks, with the mean of their changes."""
        round_ = self._round_of[optimizer]
        changes = round_.changes()
        (sums,) = order.reduce(
            changes.describe_gradients(),
            [changes.grads],
            lambda grads: [
                self._rank_sum.sum(optimizer, round_.weights, grads[0])
            ],
        )
        round_.assign(sums, self._learning_rate)


class _Round:
    """The weights of one optimizer, at the start of a round and now."""

    def __init__(self, weights: Sequence[keras.Variable]):
        self.weights: list[keras.Variable] = list(weights)
        self.updates = compat.hidden_variable(0, tf.int64)
        # The sum of this rank's shares of the batches, to weight its changes.
        self.shares = compat.hidden_variable(0, tf.float64)
        self._anchors = [_zeros_like(value) for value in self._values()]

    def note_weights(self) -> None:
        def note() -> None:
            for anchor, value in zip(
                self._anchors, self._values(), strict=True
            ):
                anchor.assign(value.read_value(), read_value=False)

        _act_if(self.updates <= 0, note)

    def changes(self) -> NamedGradients:
        """Return this rank's share of the mean decrease of the weights."""
        share = self.shares / tf.cast(self.updates, tf.float64)
        changes = [
            (anchor.read_value() - value.read_value())
            * tf.cast(share, value.dtype)
            for anchor, value in zip(self._anchors, self._values(), strict=True)
        ]
        return NamedGradients(tuple(w.path for w in self.weights), changes)

    def assign(self, means: Sequence[tf.Tensor], rate: float) -> None:
        """Run the outer step from the weights at the start of the round."""
        for anchor, value, change in zip(
            self._anchors, self._values(), means, strict=True
        ):
            with tf.device(value.device):
                value.assign(anchor.read_value() - rate * change)
        variables_lib.copy_to_towers(self.weights)
        self.reset()

    def reset(self) -> None:
        self.updates.assign(0, read_value=False)
        self.shares.assign(0, read_value=False)

    def _values(self) -> list[tf.Variable]:
        return [variables_lib.copy_on_tower(w._value) for w in self.weights]


def _act_if(condition: tf.Tensor, act: Callable[[], None]) -> None:
    """Run a function in a step if a condition holds."""

    def run() -> tf.Tensor:
        act()
        return tf.constant(0)

    tf.cond(condition, run, lambda: tf.constant(0))


def _zeros_like(value: tf.Variable) -> tf.Variable:
    with compat.outside(value.device):
        return tf.Variable(tf.zeros(value.shape, value.dtype), trainable=False)
