"""Names of Keras that are ours for a while, and are given back."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_lock = threading.RLock()
_users = 0
_undo: list[Callable[[], None]] = []


@contextlib.contextmanager
def held(install: Callable[[], None]) -> Iterator[None]:
    """Hold the patches that ``install`` makes while the block runs.

    Blocks may overlap, in several threads: the first installs, the last one to
    end undoes everything.
    """
    global _users
    with _lock:
        _users += 1
    try:
        with _lock:
            if not _undo:
                install()
        yield
    finally:
        with _lock:
            _users -= 1
            while _undo and _users == 0:
                _undo.pop()()


def replace(owner: Any, name: str, ours: Callable) -> None:
    """Put ``ours(original, ...)`` in place of ``owner.name``, once.

    Args:
        owner: a class or a module.
        name: the attribute.
        ours: called with what was there before and the call's arguments.
    """
    with _lock:
        original = getattr(owner, name)
        inherited = name not in vars(owner)
        if not inherited and hasattr(original, "__keras_towers__"):
            return

        @functools.wraps(original)
        def replacement(*args, **kwargs):
            return ours(original, *args, **kwargs)

        def undo() -> None:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

        replacement.__keras_towers__ = True
        _undo.append(undo)
        setattr(owner, name, replacement)


@contextlib.contextmanager
def shadowed(instance: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Let an object have attributes of its own while the block runs.

    Args:
        instance: the object.
        attributes: what its names, also those of methods, stand for.
    """
    # Not by setattr, by which Keras would track what a model is given.
    own = vars(instance) if attributes else {}
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


def with_subclasses(cls: type) -> list[type]:
    """The class and all classes derived from it, each once."""
    found = [cls]
    for child in cls.__subclasses__():
        found += [c for c in with_subclasses(child) if c not in found]
    return found
