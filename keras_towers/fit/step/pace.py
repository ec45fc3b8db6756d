"""Gathered weights exist for two levels at a time, not for a whole step.

TensorFlow runs an operation as soon as its inputs are there, and those of a
gather are variables: without an order, all weights would be gathered when a
step begins, and gradients would pile up behind a slow link. So what is gathered
for a level waits until the level before the last one is done, its exchanges,
too. It still goes on while the last one is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.program import Exchange, Program


class Pace:
    """Orders the gathers of weights in a program, level by level.

    Args:
        program: the program.
    """

    def __init__(self, program: Program):
        self._has_gathers = any(map(_gathers_weights, program.exchanges))
        self._computed: list[Any] = []
        self._exchanged: list[Any] = []
        # What is done when the level before the last one has been exchanged,
        # and when the last one has been computed.
        self._ends: list[Any] = []
        self._exchanges_before: list[Any] = []

    def note_computed(self, tensors: Sequence[Any]) -> None:
        """Note what the towers compute in a level."""
        self._computed += tensors

    def note_exchanged(self, results: Sequence[Any]) -> None:
        """Note what is exchanged at the end of a level."""
        self._exchanged += tf.nest.flatten(results)

    def before_exchanges(
        self, exchanges: Sequence[Exchange]
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a block for the exchanges of a level, if they have to wait."""
        waits = any(map(_gathers_weights, exchanges))
        return tf.control_dependencies(self._ends if waits else [])

    def end_level(self) -> None:
        """End a level."""
        if self._has_gathers:
            done = [*self._computed, *self._exchanges_before, *self._ends]
            with tf.control_dependencies(done):
                self._ends = [tf.no_op()]
            self._exchanges_before = self._exchanged
        self._computed, self._exchanged = [], []


def _gathers_weights(exchange: Exchange) -> bool:
    given = exchange.given
    return exchange.kind == "gather" and given.on_towers and not given.of_batch
