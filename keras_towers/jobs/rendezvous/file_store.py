"""A key-value store in a private folder, through which a job's ranks meet."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.system import replace_file


class FileStore:
    """A store in a private folder."""

    def __init__(self, folder: Path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder, folder.lstat())
        self._folder = folder

    def get(self, key: str) -> Any:
        """Read a value; None if there is none."""
        path = self._folder / key
        # Makes a shared file system forget that the file did not exist.
        os.listdir(self._folder)
        try:
            opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with open(opened, encoding="utf-8") as file:
            _check_private(path, os.fstat(file.fileno()))
            with contextlib.suppress(ValueError):
                return json.loads(file.read())
        return None

    def put(self, key: str, value: object) -> None:
        """Write a value."""
        encoded = json.dumps(value).encode()
        replace_file(self._folder / key, lambda file: file.write(encoded))

    def remove(self, key: str, value: object) -> None:
        """Remove a key, unless its value has changed."""
        with contextlib.suppress(OSError, TowerError):
            if self.get(key) == value:
                (self._folder / key).unlink()


def _check_private(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid():
        raise TowerError(
            f"{path} belongs to another user: set "
            f"{settings.ENV_RENDEZVOUS_FOLDER} to another folder."
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise TowerError(
            f"{path} holds secrets of jobs and can be read or written by other "
            f"users: run `chmod go= {path}`."
        )
