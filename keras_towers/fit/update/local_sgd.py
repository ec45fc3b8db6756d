"""Local SGD: ranks update their own weights and average them every k updates.

After k updates the ranks average their weights, weighted by the number of
examples that each has seen (McMahan et al., "Communication-Efficient Learning
of Deep Networks from Decentralized Data", 2017). Optionally the mean of the
changes is used as a gradient, from which an outer optimizer with Nesterov
momentum computes the next weights (Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.components import NamedGradients, TowerConfig
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.fit.weights.copies import parts_of
from keras_towers.fit.weights.model_state import trained_by
from keras_towers.fit.weights.shards import VariablePart
from keras_towers.foundation import compat
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.reduction.rank_sum import RankSum


class LocalSGD:
    """Local SGD for all optimizers, in rounds of a fixed number of updates."""

    def __init__(
        self,
        config: TowerConfig,
        steps: int,
        rank_sum: RankSum,
        learning_rate: float = 1.0,
    ):
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

    @contextlib.contextmanager
    def around_update(self, optimizer: Any, order: StepOrder) -> Iterator[None]:
        """Make this block's update part of a round, which it may end.

        A rank without examples undoes it.
        """
        if optimizer not in self._round_of:
            self._round_of[optimizer] = _Round(trained_by(optimizer))
        round_, is_empty = self._round_of[optimizer], self._share <= 0
        round_.note_weights()
        parts = [
            part
            for variable in (*round_.weights, *optimizer.variables)
            for part in parts_of(variable)
        ]
        before = tf.cond(
            is_empty,
            lambda: [part.copies[0].read_value() for part in parts],
            lambda: [tf.zeros([0], part.copies[0].dtype) for part in parts],
        )
        yield
        _act_if(is_empty, lambda: _assign(parts, before))
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
        """Discard the current rounds, after an error."""
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
    """A round of one optimizer: its weights at the start, and now."""

    def __init__(self, weights: Sequence[keras.Variable]):
        self.weights: list[keras.Variable] = list(weights)
        self.updates = compat.hidden_variable(0, tf.int64)
        # The sum of this rank's shares of the batches, to weight its changes.
        self.shares = compat.hidden_variable(0, tf.float64)
        self._anchors = [_zeros_like(p.copies[0]) for p in self._parts()]

    def _parts(self) -> list[VariablePart]:
        """The weights, or their parts in this process."""
        return [part for w in self.weights for part in parts_of(w)]

    def note_weights(self) -> None:
        def note() -> None:
            for anchor, part in zip(self._anchors, self._parts(), strict=True):
                anchor.assign(part.copies[0].read_value(), read_value=False)

        _act_if(self.updates <= 0, note)

    def changes(self) -> NamedGradients:
        """Return this rank's share of the mean decrease of the weights."""
        share = self.shares / tf.cast(self.updates, tf.float64)
        changes = [
            (anchor.read_value() - part.copies[0].read_value())
            * tf.cast(share, anchor.dtype)
            for anchor, part in zip(self._anchors, self._parts(), strict=True)
        ]
        names = [w.path for w in self.weights for _ in parts_of(w)]
        return NamedGradients(tuple(names), changes)

    def assign(self, means: Sequence[tf.Tensor], rate: float) -> None:
        """Run the outer step from the weights at the start of the round."""
        weights = []
        for anchor, change in zip(self._anchors, means, strict=True):
            with tf.device(anchor.device):
                weights.append(anchor.read_value() - rate * change)
        _assign(self._parts(), weights)
        self.reset()

    def reset(self) -> None:
        self.updates.assign(0, read_value=False)
        self.shares.assign(0, read_value=False)


def _assign(parts: Sequence[VariablePart], values: Sequence[tf.Tensor]) -> None:
    """Assign values to parts of variables."""
    for part, value in zip(parts, values, strict=True):
        part.assign(value)


def _act_if(condition: tf.Tensor, act: Callable[[], None]) -> None:
    """Run a function in a step if a condition holds."""

    def run() -> tf.Tensor:
        act()
        return tf.constant(0)

    tf.cond(condition, run, lambda: tf.constant(0))


def _zeros_like(value: tf.Variable) -> tf.Variable:
    with compat.outside(value.device):
        return tf.Variable(tf.zeros(value.shape, value.dtype), trainable=False)
