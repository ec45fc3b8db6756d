"""Functions that run while a step does, and end behind it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers.parameter_servers import remote
from keras_towers.replicas.resources import Queue

_HOST = "/device:CPU:0"


class Ahead:
    """A function that is asked before a step, for what is there behind it."""

    def __init__(self, name: str):
        self._running: remote.Running | None = None
        # Opens when nobody reads the weights of the step any more.
        self._gate = Queue(f"{name}/gate", _HOST, [tf.int64])

    def gate(self) -> list[tf.Tensor]:
        """Return what its writes have to wait for."""
        return self._gate.get()

    def ask(self, function: Any) -> None:
        """Start a concrete function, unless one has not been answered yet."""
        if self._running is None:
            self._running = remote.Running(function)

    def answer(self) -> remote.Running:
        """Let it write; return it, to be waited for."""
        running, self._running = self._running, None
        assert running is not None
        self._gate.put(0)
        return running

    def forget(self) -> None:
        """Break it off."""
        if self._running is not None:
            self._running.cancel()
            self._running = None
        self._gate.clear()
