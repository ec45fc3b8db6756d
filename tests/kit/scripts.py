"""Processes of Python that a test starts as a user would, alone."""

import subprocess
import sys
from pathlib import Path

from tests.kit.launchers import inherited

ROOT = Path(__file__).parents[2]


def python(
    *command: str, limit_s: float = 200, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with some arguments, no part of any job.

    Args:
        *command: ``"-c", code`` or ``"-m", module`` or a file, with arguments.
        limit_s: seconds after which it is killed.
        **variables: of its environment.
    """
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**inherited(), **variables},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
