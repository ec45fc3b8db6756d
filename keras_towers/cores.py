"""How many processor cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that the scheduler may run this process on."""
    return len(os.sched_getaffinity(0))
