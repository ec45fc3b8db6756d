"""The number of CPU cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The number of cores on which the scheduler may run this process."""
    return len(os.sched_getaffinity(0))
