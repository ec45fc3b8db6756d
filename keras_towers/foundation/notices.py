"""The package's log, and notices about normal operation in it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Hashable, Iterator

logger: logging.Logger = logging.getLogger("keras_towers")
"""The log of the package."""
# By the id of an object that lives.
_said: dict[int, set[Hashable]] = {}
_of_thread = threading.local()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress this thread's notices in a block that only tries something."""

    def is_of_other_thread(_: logging.LogRecord) -> bool:
        return threading.get_ident() != own

    own = threading.get_ident()
    before = is_silent()
    _of_thread.is_silent = True
    logger.addFilter(is_of_other_thread)
    try:
        yield
    finally:
        logger.removeFilter(is_of_other_thread)
        _of_thread.is_silent = before


def is_silent() -> bool:
    """Whether this thread's notices are suppressed."""
    return vars(_of_thread).get("is_silent", False)


def first_time(owner: object, key: Hashable) -> bool:
    """Whether a key is new for an object; remember the key.

    Args:
        owner: what the notice is about, such as a model or a strategy: another
            one of the same name has notices of its own.
        key: tells its notices apart.
    """
    if is_silent():
        return False
    if id(owner) not in _said:
        _said[id(owner)] = set()
        weakref.finalize(owner, _said.pop, id(owner), None)
    said = _said[id(owner)]
    is_new = key not in said
    said.add(key)
    return is_new


def announce(line: str) -> None:
    """Log a line at INFO; print it if the program does not log that level.

    It is not printed if the program sets a level above INFO for the logger
    ``keras_towers``, one above WARNING for the root logger, or disables
    logging.
    """
    if is_silent():
        return
    root = logging.getLogger()
    if _takes_info():
        logger.info("%s", line)
    elif not (
        logger.level > logging.INFO
        or root.level > logging.WARNING
        or root.manager.disable >= logging.INFO
    ):
        # The reader of stderr may have gone.
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr)


def _takes_info() -> bool:
    """Whether a handler receives records at INFO."""
    if not logger.isEnabledFor(logging.INFO):
        return False
    handlers = [*logger.handlers, *logging.getLogger().handlers]
    return any(handler.level <= logging.INFO for handler in handlers)
