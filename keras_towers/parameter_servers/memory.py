"""The memory of a server."""

from __future__ import annotations

import ctypes
import sys

# Numbers of glibc's parameters, from its malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1
# The largest that glibc takes: half of a thread's heap.
_MAPPED_FROM = 32 << 20


def keep_freed() -> None:
    """Keep memory that was freed, for what comes next."""
    # A server receives tensors of the same sizes again and again. If each were
    # given back to the kernel, it would clear the pages of the next one first.
    # Without effect where the C library is not glibc.
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST)
