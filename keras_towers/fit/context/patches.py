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
# The attribute that marks what ``replace`` has made.
_REPLACED = "__keras_towers__"


@contextlib.contextmanager
def held(install: Callable[[], None]) -> Iterator[None]:
    """Keep the patches that ``install`` makes for the duration of the block.

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
    when the last block of all is left. For a property the getter is replaced.
    """
    with _lock:
        there = getattr(owner, name)
        if name in vars(owner) and _is_ours(there):
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

    A decorated method is wrapped inside its decorator's closure, so that
    references taken earlier call the wrapper too.
    """
    with _lock:
        there = getattr(owner, name)
        cell = _cell_of_wrapped(there)
        if cell is None:
            is_inherited = name not in vars(owner)
            setattr(owner, name, _calling(ours, there))
            if is_inherited:
                return lambda: delattr(owner, name)
            return lambda: setattr(owner, name, there)
        original = cell.cell_contents
        cell.cell_contents = there.__wrapped__ = _calling(ours, original)

    def undo() -> None:
        cell.cell_contents = there.__wrapped__ = original

    return undo


def _calling(ours: Callable, original: Callable) -> Any:
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return ours(original, *args, **kwargs)

    vars(wrapper).pop(_REPLACED, None)
    return wrapper


def _replacement(original: Callable, ours: Callable) -> Any:
    replacement = _calling(ours, original)
    setattr(replacement, _REPLACED, True)
    return replacement


def _is_ours(value: Any) -> bool:
    value = value.fget if isinstance(value, property) else value
    return _REPLACED in getattr(value, "__dict__", {})


def _cell_of_wrapped(function: Any) -> Any:
    """The closure cell in which a decorated function keeps the original."""
    wrapped = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if wrapped is not None and cell.cell_contents is wrapped:
            return cell
    return None


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
