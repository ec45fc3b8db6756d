"""Pauses Python's garbage collector while a step is traced.

A trace makes very many objects that live as long as it does, so the collector
would search all of them again and again, and find nothing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Pause:
    """A pause of the collector, which several threads may want at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._was_on = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Pause the collector in this block, unless it is off anyway."""
        with self._lock:
            if self._blocks == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if self._blocks == 0 and self._was_on:
                    gc.enable()


without_collection = _Pause()
