"""Temporary patches of classes, modules and single objects."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

_lock = threading.RLock()
# Blocks that need the patches of a function, and what undoes these patches.
_users: collections.Counter[Callable[[], None]] = collections.Counter()
_undo: dict[Callable[[], None] | None, list[Callable[[], None]]] = {None: []}
_installing: Callable[[], None] | None = None


@contextlib.contextmanager
def held(install: Callable[[], None]) -> Iterator[None]:
    """Keep the patches that ``install`` makes for the length of the block.

    Blocks may overlap in several threads: the first one installs the patches,
    the last one to exit undoes them.
    """
    global _installing
    with _lock:
        _users[install] += 1
    try:
        with _lock:
            if not _undo.get(install):
                _undo[install], _installing = [], install
                try:
                    install()
                finally:
                    _installing = None
        yield
    finally:
        with _lock:
            _users[install] -= 1
            if not _users[install]:
                _undo_all(_undo[install])
            if not _users.total():
                _undo_all(_undo[None])


def _undo_all(undo: list[Callable[[], None]]) -> None:
    while undo:
        undo.pop()()


def replace(owner: Any, name: str, ours: Callable) -> None:
    """Patch ``owner.name`` with ``ours(original, ...)``; at most once.

    It is undone with the others that the function of ``held`` makes, or else
    when the last block of all is left. A decorated method is replaced inside
    its decorator's closure, so that references taken earlier call the
    replacement too. For a property the getter is replaced.
    """
    with _lock:
        there = getattr(owner, name)
        if name in vars(owner) and _is_ours(there):
            return
        cell = _cell_of_wrapped(there)
        if cell is not None:
            if not _is_ours(cell.cell_contents):
                _replace_in_cell(cell, ours)
            return
        if isinstance(there, property):
            assert there.fget is not None
            replacement = there.getter(_replacement(there.fget, ours))
        else:
            replacement = _replacement(there, ours)
        if name in vars(owner):
            _undo[_installing].append(lambda: setattr(owner, name, there))
        else:
            _undo[_installing].append(lambda: delattr(owner, name))
        setattr(owner, name, replacement)


def wrap(owner: Any, name: str, ours: Callable) -> Callable[[], None]:
    """Wrap ``owner.name`` in ``ours(inner, ...)`` until it is undone.

    What ``replace`` patches later lies inside: ``inner`` looks it up when it is
    called.
    """
    with _lock:
        there = getattr(owner, name)
        cell = _cell_of_wrapped(there, outermost=True)
        if cell is None:
            setattr(owner, name, _wrapper(there, ours))
            return lambda: setattr(owner, name, there)
        original = cell.cell_contents
        cell.cell_contents = there.__wrapped__ = _wrapper(original, ours)

    def undo() -> None:
        cell.cell_contents = there.__wrapped__ = original

    return undo


def _wrapper(original: Callable, ours: Callable) -> Any:
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        def inner(*args, **kwargs):
            return original(*args, **kwargs)

        return ours(inner, *args, **kwargs)

    wrapper.__keras_towers_outer__ = True  # type: ignore[attr-defined]
    return wrapper


def _replacement(original: Callable, ours: Callable) -> Any:
    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return ours(original, *args, **kwargs)

    replacement.__keras_towers__ = True  # type: ignore[attr-defined]
    return replacement


def _is_ours(value: Any) -> bool:
    value = value.fget if isinstance(value, property) else value
    return "__keras_towers__" in getattr(value, "__dict__", {})


def _cell_of_wrapped(function: Any, outermost: bool = False) -> Any:
    """The closure cell in which a decorated function keeps the original."""
    wrapped = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if wrapped is not None and _innermost(cell) is wrapped:
            outer = "__keras_towers_outer__" in vars(wrapped)
            inside = outer and not outermost
            return _cell_of_wrapped(wrapped) if inside else cell
    return None


def _innermost(cell: Any) -> Any:
    """The contents of a cell, before any replacement of ours."""
    contents = cell.cell_contents
    return contents.__wrapped__ if _is_ours(contents) else contents


def _replace_in_cell(cell: Any, ours: Callable) -> None:
    original = cell.cell_contents

    def undo() -> None:
        cell.cell_contents = original

    _undo[_installing].append(undo)
    cell.cell_contents = _replacement(original, ours)


Shadows: TypeAlias = Mapping[str, Callable[..., Any]]
"""Replacement functions by method name.

Each is called with the object, its original method, and the arguments of the
call.
"""


class Bound(functools.partial):
    """A replacement, bound to an object and the method that it replaces."""


def bound(instance: Any, methods: Shadows) -> dict[str, Any]:
    """Bind replacements to an object and its methods, for ``shadowed``."""
    return {
        name: Bound(ours, instance, getattr(instance, name))
        for name, ours in methods.items()
    }


@contextlib.contextmanager
def shadowed(instance: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Override attributes of an object inside a block.

    Bypasses Keras's __setattr__, which tracks attributes. The object keeps its
    class, and ``super()`` calls reach the originals.
    """
    own = vars(instance) if attributes else {}
    before = {name: own[name] for name in attributes if name in own}
    try:
        own.update(attributes)
        yield
    finally:
        for name, ours in attributes.items():
            if own.get(name) is ours:
                del own[name]
                if name in before:
                    own[name] = before[name]
