"""Thread-local values, and entered strategies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_open: list[tuple[str, threading.Thread]] = []


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Record that this thread is inside the block of a strategy."""
    block = name, threading.current_thread()
    _open.append(block)
    try:
        yield
    finally:
        _open.remove(block)


def open_in_other_thread() -> tuple[str, str] | None:
    """Return an open block of another thread, if this thread has none.

    Returns:
        The names of the block's strategy and of its thread, or None.
    """
    here = threading.current_thread()
    blocks = list(_open)
    if any(thread is here for _, thread in blocks):
        return None
    return next(((name, thread.name) for name, thread in blocks), None)


class Slot(Generic[T]):
    """Holds at most one value per thread, for the duration of a block."""

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
