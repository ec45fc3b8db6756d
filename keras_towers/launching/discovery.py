"""Host discovery by a user's script."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.meeting.hosts import read_entries

Discover = Callable[[], dict[str, int]]


def from_script(script: Path, slots: int) -> Discover:
    """Make a function that runs ``script`` and reads what it prints."""
    # Horovod's own version starts two Python processes for every query, once a
    # second.
    if not script.is_file():
        raise TowerError(f"host discovery script not found: {script}")
    if not os.access(script, os.X_OK):
        raise TowerError(
            f"the host discovery script {script} is not executable: "
            f"chmod +x {script}"
        )
    program = str(script.absolute())

    def discover() -> dict[str, int]:
        try:
            done = subprocess.run(
                [program],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=settings.DISCOVERY_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TowerError(f"the host discovery script: {error}") from None
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise TowerError(
                f"the host discovery script {script} ended with exit code "
                f"{done.returncode}{': ' + said[-1] if said else ''}"
            )
        lines = [line.strip() for line in done.stdout.splitlines()]
        entries = [line for line in lines if line]
        form = (
            f"the host discovery script {script} has to print lines like "
            "'host:2' or 'host'"
        )
        # An empty list is no error: hosts may appear later.
        return read_entries(entries, form, slots=slots) if entries else {}

    return discover


def patient(
    discover: Discover, known: dict[str, int], say: Callable[[str], None]
) -> Discover:
    """Go on with the hosts of before where they cannot be found."""
    # Horovod's driver keeps such an error to itself.
    before, wrong = known, ""

    def find() -> dict[str, int]:
        nonlocal before, wrong
        try:
            before, wrong = discover(), ""
        except TowerError as error:
            if str(error) != wrong:
                wrong = str(error)
                say(f"{error}; going on with the hosts of before")
        return before

    return find
