"""Synchronization of a benchmark's ranks by files in a folder.

The rows that are compared have no communication engine in common, and some have
none at all.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.005


@dataclass(frozen=True)
class Meeting:
    """The processes that measure one cell.

    Attributes:
        folder: initially empty, the same on all ranks.
        rank: this process.
        size: number of processes.
    """

    folder: Path
    rank: int
    size: int

    def leave(self, name: str, text: str = "") -> None:
        """Publish a text under a name."""
        path = self._path(name, self.rank)
        # Rename, so that readers never see a partial file.
        part = path.with_name(f"{path.name}.part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)

    def complete(self, name: str) -> bool:
        """Whether all ranks have published a text under this name."""
        return all(self._path(name, r).exists() for r in range(self.size))

    def exchange(self, name: str, text: str = "") -> list[str]:
        """Publish a text and wait for those of all ranks, in rank order."""
        self.leave(name, text)
        while not self.complete(name):
            time.sleep(_POLL_S)
        return self.read(name)

    def read(self, name: str) -> list[str]:
        """Return the texts of all ranks under this name."""
        return [
            self._path(name, rank).read_text(encoding="utf-8")
            for rank in range(self.size)
        ]

    def _path(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{rank}"
