"""Handling signals for a while."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def handled(
    numbers: Iterable[int], handler: Callable[[int, Any], Any]
) -> Iterator[None]:
    """Handle signals inside a block, and as before behind it.

    Does nothing outside the main thread, where Python never handles signals.

    Args:
        numbers: the signals.
        handler: is called with the number and the current frame.

    Example:
        >>> with handled([signal.SIGTERM], signal.default_int_handler):
        ...     train()
    """
    with contextlib.ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                before = signal.signal(number, handler)
                # None if it was not set from Python.
                undo.callback(signal.signal, number, before or signal.SIG_DFL)
        yield
