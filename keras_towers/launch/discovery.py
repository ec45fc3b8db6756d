"""Host discovery by a user's script."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from keras_towers.errors import TowerError
from keras_towers.launch.hosts import parse_hosts

Discover = Callable[[], dict[str, int]]
_SCRIPT_S = 20


def from_script(script: Path, slots: int) -> Discover:
    """Make a function that runs ``script`` and reads what it prints.

    Horovod's own version starts two Python processes for every query, once a
    second.

    Args:
        script: prints one ``host:slots`` or ``host`` per line.
        slots: slots of hosts printed without a number.

    Raises:
        TowerError: it does not exist or is not executable.
    """
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
                text=True,
                timeout=_SCRIPT_S,
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
        entries = [
            line if ":" in line else f"{line}:{slots}" for line in lines if line
        ]
        # An empty list is no error: hosts may appear later.
        return parse_hosts(",".join(entries)) if entries else {}

    return discover
