"""Refuses classes of other packages that lack a method, before they run."""

from __future__ import annotations

from abc import ABC
from typing import Any, Self

from keras_towers.foundation.errors import TowerError


class Extensible(ABC):  # noqa: B024, what is abstract is in subclasses
    """The base class of classes that other packages inherit from.

    Raises:
        TowerError: a subclass does not define all abstract methods.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the class of an object that is made."""
        if missing := sorted(cls.__abstractmethods__):
            raise TowerError(_lacks(cls, missing))
        return super().__new__(cls)


def check_complete(value: object, protocol: type, advice: str) -> None:
    """Refuse an object that lacks a part that a protocol declares.

    Args:
        value: the object.
        protocol: the protocol.
        advice: what to do, a sentence.

    Raises:
        TowerError: it lacks methods or attributes.
    """
    declared = {
        name
        for base in protocol.__mro__
        for name in (*vars(base), *vars(base).get("__annotations__", ()))
        if not name.startswith("_")
    }
    if missing := sorted(n for n in declared if not hasattr(value, n)):
        raise TowerError(f"{_lacks(type(value), missing)} {advice}")


def name_of(value: object) -> str:
    """Return the name of a class or function, or of an object's class."""
    named: Any = value if hasattr(value, "__name__") else type(value)
    return f"{named.__module__}.{named.__name__}"


def _lacks(kind: type, names: list[str]) -> str:
    return (
        f"{name_of(kind)} is not complete: it does not define "
        f"{', '.join(names)}."
    )
