"""Ctrl-C, where a model is half on the towers and half off them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let a Ctrl-C wait for the end of the block.

    Python handles signals in its main thread only; in others there is nothing
    to wait for.
    """
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or handler is None:
        yield
        return
    waiting: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)
