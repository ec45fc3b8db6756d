"""The cache of wheels built on this machine, by target."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import platformdirs

from keras_towers import settings
from keras_towers.building import target
from keras_towers.building.recipe import Recipe
from keras_towers.system import writable


def folder() -> Path:
    """The folder of wheels and logs; ``settings.CACHE`` overrides it."""
    chosen = os.environ.get(settings.CACHE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("keras-towers", appauthor=False)


def made(folder: Path) -> Path:
    """Make a folder of the cache, or raise ``UnusableFolder``."""
    return writable(folder, f"name another one in {settings.CACHE}")


class Shelf:
    """The cache entry of one wheel, specific to its target and options."""

    def __init__(self, recipe: Recipe):
        self._key = {**target.facts(), **recipe.key()}
        text = json.dumps(self._key, sort_keys=True).encode()
        digest = hashlib.sha256(text).hexdigest()[:16]
        self.path: Path = folder() / recipe.name / digest

    def find(self) -> Path | None:
        """The wheel, if it has been built."""
        return next(iter(sorted(self.path.glob("*.whl"))), None)

    def store(self, wheel: Path) -> Path:
        """Store a wheel atomically."""
        made(self.path)
        with tempfile.TemporaryDirectory(dir=self.path, prefix=".new-") as new:
            copy = Path(new) / wheel.name
            shutil.copyfile(wheel, copy)
            described = Path(new) / "built-for.json"
            described.write_text(json.dumps(self._key, indent=2) + "\n")
            os.replace(described, self.path / described.name)
            os.replace(copy, self.path / wheel.name)
        return self.path / wheel.name

    @contextlib.contextmanager
    def locked(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Let one process at a time build the wheel; the next finds it."""
        made(self.path)
        lock = filelock.FileLock(self.path / ".lock")
        # Releasing a lock that is not held does nothing.
        with contextlib.ExitStack() as stack:
            stack.callback(lock.release)
            try:
                lock.acquire(blocking=False)
            except filelock.Timeout:
                on_wait()
                lock.acquire()
            except (OSError, NotImplementedError):
                pass
            yield
