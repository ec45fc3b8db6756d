"""Which thread has entered a strategy's block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_open: list[tuple[str, threading.Thread]] = []


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Note that this thread is inside a block of a strategy.

    Args:
        name: the class name of the strategy.
    """
    block = name, threading.current_thread()
    _open.append(block)
    try:
        yield
    finally:
        _open.remove(block)


def elsewhere() -> tuple[str, str] | None:
    """Return the strategy and the thread of a block that is not this thread's.

    Returns:
        Their names; None if there is no such block, or this thread has one too.
    """
    here = threading.current_thread()
    blocks = list(_open)
    if any(thread is here for _, thread in blocks):
        return None
    return next(((name, thread.name) for name, thread in blocks), None)
