"""Notes about objects that have no usable ``==``, such as Keras variables."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByIdentity(Generic[K, V]):
    """A mapping from objects, by identity, in the order of insertion."""

    def __init__(self, weak: bool = True):
        self._weak = weak
        self._entries: dict[int, tuple[Any, V]] = {}

    def __setitem__(self, key: K, value: V) -> None:
        name, entries = id(key), self._entries

        def forget(dead: weakref.ref) -> None:
            # Another object may have got the id since.
            if name in entries and entries[name][0] is dead:
                del entries[name]

        self._entries[name] = (
            weakref.ref(key, forget) if self._weak else (lambda: key),
            value,
        )

    def __contains__(self, key: K) -> bool:
        entry = self._entries.get(id(key))
        return entry is not None and entry[0]() is key

    def __getitem__(self, key: K) -> V:
        if key not in self:
            raise KeyError(key)
        return self._entries[id(key)][1]

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        del self._entries[id(key)]

    def __iter__(self) -> Iterator[K]:
        for find, _ in list(self._entries.values()):
            key = find()
            if key is not None:
                yield key

    def get(self, key: K, default: V) -> V:
        """Return the value of a key, or ``default`` if there is none."""
        try:
            return self[key]
        except KeyError:
            return default

    def setdefault(self, key: K, value: V) -> V:
        """Return the value of a key, which is ``value`` if it is new."""
        if key not in self:
            self[key] = value
        return self[key]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
