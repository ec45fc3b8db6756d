"""Thread-local values for the length of a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Slot(Generic[T]):
    """Holds at most one value per thread.

    Example:
        >>> depth: Slot[int] = Slot()
        >>> with depth.filled(1):
        ...     depth.get()
        1
        >>> depth.get() is None
        True
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self) -> T | None:
        """Return this thread's value, or None outside of any block."""
        return getattr(self._local, "value", None)

    @contextlib.contextmanager
    def filled(self, value: T | None) -> Iterator[None]:
        """Set this thread's value inside a block, then restore it."""
        before = self.get()
        self._local.value = value
        try:
            yield
        finally:
            self._local.value = before
