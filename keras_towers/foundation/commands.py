"""Runs commands that end with all they started, and reads their output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_towers.foundation import settings
from keras_towers.foundation.object_types import JsonObject


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
        """Why the command failed, with the last line of its errors."""
        why = f"has ended with exit code {self.code}"
        if self.code is None:
            why = f"has not ended after {limit_s:.0f} s"
        lines = self.stderr.strip().splitlines()
        return f"{why}: {lines[-1]}" if lines else why


class NoAnswer(Exception):
    """Raised if a process printed no result; the message says why."""


def run_command(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    *,
    log: Path | None = None,
    grace_s: float = settings.COMMAND_GRACE_S,
    stop: threading.Event | None = None,
) -> CommandResult:
    """Run a command; when this returns, its whole process group has ended.

    Args:
        command: the command and its arguments.
        timeout_s: end the command after this many seconds.
        environment: its variables; None: those of this process.
        log: a file to append its output and errors to, instead of returning
            the errors separately.
        grace_s: seconds between SIGTERM and SIGKILL.
        stop: set by another thread to end the command.
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
            code = _wait(process, timeout_s, stop or threading.Event())
        finally:
            _end_group(process, grace_s)
        return CommandResult(code, _text(out), "" if log else _text(err))


def _wait(
    process: subprocess.Popen[bytes], limit_s: float, stop: threading.Event
) -> int | None:
    """Wait for the exit code of a process; None if it must end early."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until and not stop.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(settings.POLL_S)
    return None


def ask_python(
    arguments: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> JsonObject:
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
