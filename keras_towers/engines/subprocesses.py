"""Runs a long command whose output goes into a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

_GRACE_S = 5


def run_logged(
    command: list[str],
    environment: dict[str, str],
    log: Path,
    on_line: Callable[[str], None],
) -> int:
    """Run a command, and end it with all its children if this is interrupted.

    Args:
        command: program and arguments.
        environment: all of its environment.
        log: gets what it writes.
        on_line: called with every line as it comes.

    Returns:
        Its exit status.
    """
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            encoding="utf-8",
            errors="replace",
            # A group of its own, so that compilers can be ended with it.
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                on_line(line)
            return process.wait()
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
