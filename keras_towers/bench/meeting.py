"""Where the ranks of a benchmark wait for each other: files in a folder.

Rows are to be compared that have no engine in common to wait by, and one that
has none at all.
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
        folder: empty at first, and the same on all ranks.
        rank: this process.
        size: number of processes.
    """

    folder: Path
    rank: int
    size: int

    def leave(self, name: str, text: str = "") -> None:
        """Leave a text under a name, for the others to see."""
        path = self._path(name, self.rank)
        # Whoever sees the file must see all of it.
        part = path.with_name(f"{path.name}.part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)

    def complete(self, name: str) -> bool:
        """Whether all ranks have left something under this name."""
        return all(self._path(name, r).exists() for r in range(self.size))

    def exchange(self, name: str, text: str = "") -> list[str]:
        """Leave a text and wait for those of all ranks, in their order."""
        self.leave(name, text)
        while not self.complete(name):
            time.sleep(_POLL_S)
        return self.read(name)

    def read(self, name: str) -> list[str]:
        """Return what all ranks have left under this name."""
        return [
            self._path(name, rank).read_text(encoding="utf-8")
            for rank in range(self.size)
        ]

    def _path(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{rank}"
