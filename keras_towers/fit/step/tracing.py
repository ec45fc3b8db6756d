"""Telling the user that the first step takes long."""

from __future__ import annotations

import time

import tensorflow as tf

from keras_towers._notices import announce
from keras_towers.fit import told
from keras_towers.fit.contract import TowerConfig

# Seconds for all towers from which on it is said.
PATIENCE = 10.0


class Tracing:
    """The trace of one step on all towers of this process, one by one.

    Args:
        config: the towers.
        name: the name of the model.
    """

    def __init__(self, config: TowerConfig, name: str):
        self._config = config
        self._name = name
        self._start = time.monotonic()
        self._is_silent = bool(tf.executing_eagerly() or config.peers.rank)

    def first_is_traced(self) -> None:
        """Say what is to come, if the first tower took long."""
        if self._is_silent:
            return
        seconds = time.monotonic() - self._start
        towers = self._config.num_towers
        slow = seconds * towers >= PATIENCE
        if slow and told.is_news(("a slow trace", self._name)):
            announce(
                f"preparing {towers} towers for the first step of "
                f"{self._name!r}: the first of them took {seconds:.0f} s ..."
            )
