"""Counts the exchanges of a process for the watch over its ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.jobs.rendezvous import activity

Collective: TypeAlias = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
_SentT = TypeVar("_SentT")
_ReceivedT = TypeVar("_ReceivedT", bound=Sequence)


class GraphCounts:
    """The numbers of exchanges in graphs: begun, and ended."""

    def __init__(self) -> None:
        self._begun: tf.Variable = compat.hidden_variable(0, tf.int64)
        self.ended: tf.Variable = compat.hidden_variable(0, tf.int64)

    def counted(
        self,
        collective: Callable[[Sequence[_SentT]], _ReceivedT],
        sent: Sequence[_SentT],
    ) -> _ReceivedT:
        """Run a collective in a graph, and count it while it runs.

        It begins once this rank has computed all that it sends, so that a long
        computation does not count as a wait.

        Args:
            collective: the collective.
            sent: tensors or slices that this rank sends.
        """
        with tf.control_dependencies(_tensors(sent)), tf.device(compat.HOST):
            number = self._begun.assign_add(1)
        # Not after the count: what is computed first is sent first.
        results = collective(sent)
        with tf.control_dependencies(_tensors(results)), tf.device(compat.HOST):
            # Not one more: a step that was cancelled may have ended none.
            self.ended.assign(number, read_value=False)
        return results

    def read(self) -> tuple[int, int]:
        """Return how many have begun, and then how many have ended.

        In this order, an exchange that has ended cannot seem to run.
        """
        # Also while another thread traces.
        with tf.init_scope():
            return int(self._begun.numpy()), int(self.ended.numpy())


def counted(
    name: str, collective: Collective, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Run a collective, and count it as an exchange while it runs.

    Args:
        name: of the exchange, the same on all ranks.
        collective: the collective.
        tensors: what this rank sends.
    """
    if tf.executing_eagerly():
        with activity.this_rank.exchanges.running(name):
            return collective(tensors)
    return counts_of(name).counted(collective, tensors)


@functools.cache
def counts_of(name: str) -> GraphCounts:
    """Return the counts of the exchanges of a name, which the watch reads."""
    counts = GraphCounts()
    activity.this_rank.exchanges.add(name, counts.read)
    return counts


def _tensors(values: Sequence[object]) -> list[tf.Tensor]:
    return tf.nest.flatten(list(values), expand_composites=True)
