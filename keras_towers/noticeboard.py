"""Values that the processes of a job on one machine leave for one another.

Files in a folder that the launcher makes for the job, and that only its user
may enter.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

FOLDER = "KERAS_TOWERS_NOTICEBOARD"
"""The variable in which a process finds the folder."""


class Noticeboard:
    """Has what of the job's rendezvous server the processes themselves use.

    Args:
        folder: of the job.

    Example:
        >>> board = Noticeboard("/tmp/job")
        >>> board.put("mine", b"here")
        >>> board.get("mine")
        b'here'
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = Path(folder)

    def get(self, key: str) -> bytes | None:
        """Read a value, None if there is none.

        Raises:
            OSError: the folder is gone.
        """
        if not self._folder.is_dir():
            raise FileNotFoundError(self._folder)
        try:
            return (self._folder / key).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key: str, value: bytes) -> None:
        """Leave a value.

        Raises:
            OSError: the folder is gone.
        """
        # A reader finds all of it or nothing.
        number, path = tempfile.mkstemp(dir=self._folder)
        with open(number, "wb") as file:
            file.write(value)
        os.replace(path, self._folder / key)


def from_environment() -> Noticeboard | None:
    """That of this process's job, None without one."""
    folder = os.environ.get(FOLDER)
    return Noticeboard(folder) if folder else None
