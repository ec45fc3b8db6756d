"""This machine and process: cores, folders, signals, memory, end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import os
import re
import resource
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from types import FrameType
from typing import IO, TypeVar

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError

_R = TypeVar("_R")


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def cpu() -> dict[str, str]:
    """Return the fields of the first CPU in ``/proc/cpuinfo``."""
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    return dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))


def working_folder() -> Path:
    """Return the working directory.

    Raises:
        TowerError: it has been deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise TowerError(
            "the working directory of this process has been deleted: change to "
            "one that exists."
        ) from None


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, relative to the working directory.

    Raises:
        TowerError: it is relative to one that has been deleted.
    """
    given = Path(path)
    return given if given.is_absolute() else working_folder() / given


class UnusableFolder(TowerError):
    """Raised if a folder cannot be made or written to."""


def make_writable(folder: Path, advice: str) -> Path:
    """Make a folder that can be written to, or raise ``UnusableFolder``.

    Args:
        folder: its path.
        advice: ends the message of the error.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    # ValueError: the path has a null character.
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UnusableFolder(
            f"cannot write to the folder {folder} ({why}): {advice}"
        ) from error


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a private file under another name, then rename it.

    Args:
        path: the file.
        write: writes the new content, to a file beside it.
    """
    descriptor, name = tempfile.mkstemp(".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_writable(path: Path, writer: str) -> None:
    """Raise an error now if a file cannot be written later.

    Args:
        path: the path of the file.
        writer: begins the message of the error.
    """
    try:
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TowerError(
            f"{writer} cannot write {str(path)!r} ({why}): give the path of a "
            "file that can be written."
        ) from error


def allow_open_files(number: int, needed_by: str) -> str:
    """Raise this process's limit of open files, up to its hard limit.

    Processes that it starts inherit this.

    Args:
        number: how many.
        needed_by: what needs them, to begin a sentence.

    Returns:
        What is to be said if they are too few; empty: they are enough.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if limit != unlimited and limit < number:
        limit = number if most == unlimited else min(number, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    if limit == unlimited or limit >= number:
        return ""
    return (
        f"{needed_by} may need {number:,} open files in this process, which "
        f"may open {limit:,}: raise its limit (`ulimit -Hn`)"
    )


@contextlib.contextmanager
def handle_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals inside a block; outside the main thread, do nothing."""
    with contextlib.ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                previous = signal.signal(number, handler)
                # None if the handler was not installed from Python.
                undo.callback(signal.signal, number, previous or signal.SIG_DFL)
        yield


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer a Ctrl-C to the end of the block."""
    deferred: list[int] = []
    try:
        with handle_signals(
            [signal.SIGINT], lambda number, _: deferred.append(number)
        ):
            yield
    finally:
        if deferred:
            signal.raise_signal(signal.SIGINT)


# Numbers of parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_NEVER = 2**31 - 1
# The largest threshold that glibc accepts: half of a thread's heap.
_MAX_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """Make this process reuse freed memory instead of returning it.

    A server receives tensors of the same sizes again and again. If their memory
    were returned, the kernel would have to clear the pages of every new tensor.
    """
    # TensorFlow's wheels need glibc, which has this function.
    glibc = ctypes.CDLL(None)
    glibc.mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
    glibc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def share_freed_memory() -> None:
    """Let threads of this process use what others have freed.

    Each heap of glibc keeps as much as its threads have ever needed at a time,
    and by default there are eight for each core.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, usable_cores())


def resident_bytes(field: str) -> int | None:
    """Return the memory of this process; None if Linux does not report it.

    Args:
        field: ``"VmRSS"``, what is resident now, or ``"VmHWM"``, its peak.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    size = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(size[1]) * 1024 if size else None


def return_freed_memory() -> None:
    """Return freed memory to the kernel.

    Otherwise glibc keeps it between live objects, where larger values do not
    fit.
    """
    ctypes.CDLL(None).malloc_trim(0)


class InThread(Future[_R]):
    """The result of a function that runs in a thread of its own.

    The thread does not keep this process from ending.
    """

    def __init__(self, function: Callable[[], _R], name: str | None = None):
        super().__init__()
        self.thread: threading.Thread = threading.Thread(
            target=self._run, args=(function,), name=name, daemon=True
        )
        self.thread.start()

    def _run(self, function: Callable[[], _R]) -> None:
        try:
            result = function()
        except BaseException as error:
            self.end_wait(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self.set_result(result)

    def end_wait(self, error: BaseException) -> None:
        """Raise an error in the waiting thread, if there is no result yet."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)


def call_within(limit_s: float, function: Callable[[], _R]) -> _R:
    """Call a function in a thread of its own.

    Raises:
        TimeoutError: it has not ended in time. It goes on, and this process
            may have to end without it.
    """
    running = InThread(function, "keras-towers-limited")
    try:
        return running.result(limit_s)
    except TimeoutError:
        if not running.done():
            limit_teardown()
        raise


@functools.cache
def limit_teardown() -> None:
    """End this process soon after its script, if its job has lost a process.

    TensorFlow's teardown may wait a minute for an answer of the lost process,
    at a point where Python runs no threads any more.
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    atexit.register(
        lambda: faulthandler.dump_traceback_later(
            settings.TEARDOWN_S, exit=True, file=devnull
        )
    )
