"""Names of Keras that are ours for a while, and are given back."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

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

    A method that Keras has wrapped in a decorator is replaced inside of it, so
    that whoever took hold of the method before, under whatever name, calls ours
    too. Of a property it is the getter that is replaced.

    Args:
        owner: a class or a module.
        name: the attribute.
        ours: called with what was there before and the call's arguments.
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
            _undo.append(lambda: setattr(owner, name, there))
        else:
            _undo.append(lambda: delattr(owner, name))
        setattr(owner, name, replacement)


def _replacement(original: Callable, ours: Callable) -> Any:
    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return ours(original, *args, **kwargs)

    replacement.__keras_towers__ = True  # type: ignore[attr-defined]
    return replacement


def _is_ours(value: Any) -> bool:
    value = value.fget if isinstance(value, property) else value
    return "__keras_towers__" in getattr(value, "__dict__", {})


def _cell_of_wrapped(function: Any) -> Any:
    """Where a decorated function keeps the one that it was made of."""
    wrapped = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if wrapped is not None and _innermost(cell) is wrapped:
            return cell
    return None


def _innermost(cell: Any) -> Any:
    """What a cell holds, or held before it was replaced."""
    contents = cell.cell_contents
    return contents.__wrapped__ if _is_ours(contents) else contents


def _replace_in_cell(cell: Any, ours: Callable) -> None:
    original = cell.cell_contents

    def undo() -> None:
        cell.cell_contents = original

    _undo.append(undo)
    cell.cell_contents = _replacement(original, ours)


Shadows: TypeAlias = Mapping[str, Callable[..., Any]]
"""Functions by the names of the methods that they stand for.

Each is called with the object, with what its method was, and with the call's
arguments.
"""


class _Shadow:
    """Stands for a method of one object."""

    def __init__(self, instance: Any, name: str, ours: Callable):
        self.had_own = name in vars(instance)
        self.original = getattr(instance, name)
        self._instance = instance
        self._ours = ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ours(self._instance, self.original, *args, **kwargs)


def shadow(instance: Any, methods: Shadows) -> None:
    """Let methods of one object be ours until ``unshadow``.

    The object keeps its class, and what its class does by ``super()`` is the
    original. A method that is shadowed already is left.

    Args:
        instance: the object.
        methods: what its methods are to do.
    """
    own = vars(instance)
    for name, ours in methods.items():
        if not is_shadowed(instance, name):
            own[name] = _Shadow(instance, name, ours)


def unshadow(instance: Any, names: Iterable[str]) -> None:
    """Give an object its own methods back, where ``shadow`` took them."""
    own = vars(instance)
    for name in names:
        ours = own.get(name)
        if isinstance(ours, _Shadow):
            del own[name]
            if ours.had_own:
                own[name] = ours.original


def is_shadowed(instance: Any, name: str) -> bool:
    """Whether a method of the object is ours."""
    return isinstance(vars(instance).get(name), _Shadow)


@contextlib.contextmanager
def shadowing(instances: Iterable[Any], methods: Shadows) -> Iterator[None]:
    """Let methods of objects be ours for a block, as ``shadow``."""
    instances = list(instances)
    try:
        for instance in instances:
            shadow(instance, methods)
        yield
    finally:
        for instance in instances:
            unshadow(instance, methods)


@contextlib.contextmanager
def shadowed(instance: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Let an object have attributes of its own while the block runs.

    One that somebody else sets meanwhile stays.

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
        for name, ours in attributes.items():
            if own.get(name) is not ours:
                continue
            del own[name]
            if name in before:
                own[name] = before[name]


def bound(instance: Any, methods: Shadows) -> dict[str, Any]:
    """Functions for ``shadowed`` that call the object's own methods."""
    return {
        name: functools.partial(ours, instance, getattr(instance, name))
        for name, ours in methods.items()
    }


def with_subclasses(cls: type) -> list[type]:
    """The class and all classes derived from it, each once."""
    found: list[type] = [cls]
    child: type
    for child in cls.__subclasses__():
        found += [c for c in with_subclasses(child) if c not in found]
    return found
