"""The growth of a process's memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_STATUS = Path("/proc/self/status")


class Growth:
    """Measures by how much the resident memory grows at its peak.

    The peak is counted from here on, where the kernel allows it.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            # 5 sets the peak to what is resident now.
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _kilobytes("VmRSS")

    def megabytes(self) -> float:
        """Return the peak above what was resident at first."""
        return (_kilobytes("VmHWM") - self._before) * 1024 / 1e6


def _kilobytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    return int(found[1]) if found else 0
