"""Notices about normal operation, at the level INFO."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Hashable

_logger = logging.getLogger("keras_towers")
_said: set[Hashable] = set()


def first_time(key: Hashable) -> bool:
    """Return whether a key is new, and remember it."""
    if key in _said:
        return False
    _said.add(key)
    return True


def announce(line: str) -> None:
    """Log a line at INFO; show it where the program does not log that level.

    Whoever sets a level above INFO for the logger ``keras_towers``, one above
    WARNING for the root, or disables logging, does not see it.
    """
    root = logging.getLogger()
    if _takes_info():
        _logger.info("%s", line)
    elif not (
        _logger.level > logging.INFO
        or root.level > logging.WARNING
        or root.manager.disable >= logging.INFO
    ):
        # The reader of stderr may have gone.
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr)


def _takes_info() -> bool:
    """Whether a handler gets what is logged at INFO."""
    if not _logger.isEnabledFor(logging.INFO):
        return False
    handlers = [*_logger.handlers, *logging.getLogger().handlers]
    return any(handler.level <= logging.INFO for handler in handlers)
