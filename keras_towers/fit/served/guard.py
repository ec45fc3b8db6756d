"""Steps that a parameter server does not answer, and their end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from keras_towers import compat

_LOOK_S = 2.0


class Guard:
    """Ends a step in which a server has ceased to answer.

    TensorFlow waits for it without limit, and takes no notice of Ctrl-C.

    Args:
        check: asks the servers for an answer; raises what a step is to raise
            where there is none.
    """

    def __init__(self, check: Callable[[], None]):
        self._check = check
        self._manager = compat.CancellationManager()
        self._begun: float | None = None
        self._ended = threading.Event()
        self._error: Exception | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at steps now and then, inside a block."""
        # What is traced for it is traced in the thread of fit.
        self._check()
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a step of this thread inside a block."""
        self._begun = time.monotonic()
        try:
            with compat.cancelling(self._manager):
                yield
        except tf.errors.CancelledError:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            self._begun = None

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            begun = self._begun
            if begun is None or time.monotonic() - begun < _LOOK_S:
                continue
            try:
                self._check()
            except Exception as error:
                self._error = error
                self._manager.start_cancel()
                return
