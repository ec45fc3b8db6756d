"""Cores, folders, signals and memory of this machine."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from keras_towers import settings
from keras_towers.errors import TowerError


def usable_cores() -> int:
    """The number of cores on which the scheduler may run this process."""
    return len(os.sched_getaffinity(0))


def cpu() -> dict[str, str]:
    """What Linux says of this machine's first CPU."""
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    return dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))


class UnusableFolder(TowerError):
    """A folder that cannot be made or written to."""


def writable(folder: Path, advice: str) -> Path:
    """Make a folder, or raise ``UnusableFolder`` with advice."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    # A path with a null character is a ValueError.
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UnusableFolder(
            f"cannot write to the folder {folder} ({why}): {advice}"
        ) from error


def writable_file(path: Path, who: str) -> None:
    """Raise an error for who is to write a file later, if nobody can."""
    try:
        there = path.exists()
        path.open("a").close()
        if not there:
            path.unlink()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TowerError(
            f"{who} cannot write {str(path)!r} ({why}): give the path of a "
            "file that can be written."
        ) from error


@contextlib.contextmanager
def handled(
    numbers: Iterable[int], handler: Callable[[int, Any], Any]
) -> Iterator[None]:
    """Handle signals inside a block; nothing outside the main thread."""
    with contextlib.ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                before = signal.signal(number, handler)
                # None if it was not set from Python.
                undo.callback(signal.signal, number, before or signal.SIG_DFL)
        yield


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer a Ctrl-C to the end of the block."""
    waiting: list[int] = []
    try:
        with handled([signal.SIGINT], lambda number, _: waiting.append(number)):
            yield
    finally:
        if waiting:
            signal.raise_signal(signal.SIGINT)


# Numbers of glibc's parameters, from its malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1
# The largest that glibc takes: half of a thread's heap.
_MAPPED_FROM = 32 << 20


def keep_freed() -> None:
    """Keep memory that was freed, for what comes next.

    A server receives tensors of the same sizes again and again. If each were
    given back to the kernel, it would clear the pages of the next one first.
    """
    # Only glibc has the function, and can do it.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)


@functools.cache
def end_in_time() -> None:
    """End this process soon after its script, as its job has lost another.

    TensorFlow's own end may wait for an answer of the lost one, for a minute,
    where Python no longer runs any thread.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    atexit.register(
        lambda: faulthandler.dump_traceback_later(
            settings.TEARDOWN_S, exit=True, file=nowhere
        )
    )
