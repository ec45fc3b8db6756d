"""Cores, folders, signals, memory and commands of this machine."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_towers import settings
from keras_towers.errors import TowerError


def usable_cores() -> int:
    """The number of cores on which the scheduler may run this process."""
    return len(os.sched_getaffinity(0))


def cpu() -> dict[str, str]:
    """The fields of the first CPU in ``/proc/cpuinfo``."""
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    return dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))


class UnusableFolder(TowerError):
    """A folder that cannot be made or written to."""


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


@contextlib.contextmanager
def handle_signals(
    numbers: Iterable[int], handler: Callable[[int, Any], Any]
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


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command.

    Attributes:
        code: its exit code; -N: signal N ended it; None: the time limit did.
        stdout: its output.
        stderr: its errors.
    """

    code: int | None
    stdout: str
    stderr: str

    def reason(self, limit_s: float) -> str:
        """Why the command has failed, with the last line of its errors."""
        why = f"has ended with exit code {self.code}"
        if self.code is None:
            why = f"has not ended after {limit_s:.0f} s"
        lines = self.stderr.strip().splitlines()
        return f"{why}: {lines[-1]}" if lines else why


class NoAnswer(Exception):
    """A process printed no result; the message says why, in one line."""


def run_command(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    *,
    log: Path | None = None,
    grace_s: float = settings.COMMAND_GRACE_S,
) -> CommandResult:
    """Run a command; when this returns, its whole process group has ended.

    Args:
        command: the command and its arguments.
        timeout_s: end the command after this many seconds.
        environment: its variables; None: those of this process.
        log: a file to append its output and errors to, instead of returning
            the errors separately.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    # Files, because orphaned children of the command would keep pipes open.
    with tempfile.TemporaryDirectory(
        prefix="keras-towers-", ignore_cleanup_errors=True
    ) as folder:
        out = log or Path(folder, "stdout")
        err = log or Path(folder, "stderr")
        with out.open("ab") as stdout, err.open("ab") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )
        code: int | None = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_group(process, grace_s)
        return CommandResult(code, _text(out), "" if log else _text(err))


def ask_python(
    arguments: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a fresh Python and return the JSON object that it prints last."""
    result = run_command([sys.executable, *arguments], timeout_s, environment)
    for line in reversed(result.stdout.splitlines()):
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
    raise NoAnswer(result.reason(timeout_s))


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
