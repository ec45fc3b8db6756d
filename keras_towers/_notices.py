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
    """Log a line at INFO; show it if the program has not set up logging."""
    root = logging.getLogger()
    if _logger.isEnabledFor(logging.INFO):
        _logger.info("%s", line)
    elif not (_logger.level or root.handlers or root.manager.disable):
        # The reader of stderr may have gone.
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr)
