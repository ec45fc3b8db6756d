"""A dictionary for keys without a usable ``==``, such as Keras variables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class IdentityKey(weakref.ref[K]):
    """A weak reference that equals only references to the same living object.

    An ``id`` alone could also belong to a later object, which got the address
    of a freed one.
    """

    __slots__ = ("_hash",)
    _hash: int

    def __new__(
        cls, target: K, callback: Callable[[Self], object] | None = None
    ) -> Self:
        self = super().__new__(cls, target, callback)
        self._hash = id(target)
        return self

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        target = self()
        return (
            target is not None
            and isinstance(other, IdentityKey)
            and target is other()
        )

    def __ne__(self, other: object) -> bool:
        return not self == other


class IdentityDict(MutableMapping[K, V]):
    """A mapping that compares keys by identity, and holds them weakly."""

    def __init__(self) -> None:
        self._entries: dict[IdentityKey[K], V] = {}

    def __setitem__(self, key: K, value: V) -> None:
        entries = self._entries
        entries[IdentityKey(key, lambda dead: entries.pop(dead, None))] = value

    def __getitem__(self, key: K) -> V:
        return self._entries[IdentityKey(key)]

    def __delitem__(self, key: K) -> None:
        del self._entries[IdentityKey(key)]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        for name in list(self._entries):
            key = name()
            if key is not None:
                yield key
