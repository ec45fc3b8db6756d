"""A dictionary for keys without a usable ``==``, such as Keras variables."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class IdentityDict(MutableMapping[K, V]):
    """A mapping that compares keys by identity, and holds them weakly."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[K], V]] = {}

    def __setitem__(self, key: K, value: V) -> None:
        name, entries = id(key), self._entries

        def forget(dead: weakref.ref) -> None:
            # Another object may have got the id since.
            if name in entries and entries[name][0] is dead:
                del entries[name]

        self._entries[name] = weakref.ref(key, forget), value

    def __getitem__(self, key: K) -> V:
        find, value = self._entries[id(key)]
        if find() is not key:
            raise KeyError(key)
        return value

    def __delitem__(self, key: K) -> None:
        del self._entries[id(key)]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        for find, _ in list(self._entries.values()):
            key = find()
            if key is not None:
                yield key
