"""Folders that users name."""

from __future__ import annotations

import tempfile
from pathlib import Path

from keras_towers.errors import TowerError


class UnusableFolder(TowerError):
    """A folder cannot be made, or not be written to."""


def writable(folder: Path, advice: str) -> Path:
    """Make a folder if need be, and see whether files can be made there.

    Args:
        folder: the folder.
        advice: what to do if it is of no use.

    Raises:
        UnusableFolder: it is of no use.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UnusableFolder(
            f"cannot write to the folder {folder} ({error.strerror}): {advice}"
        ) from error
