"""Checks the values of arguments against their annotations."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Literal

from keras_towers.foundation.errors import TowerError

# Number types, NumPy's included, and their names in messages.
_NUMBERS = {int: (Integral, "a whole number"), float: (Real, "a number")}
_NAMES = {
    Callable: "a function",
    Mapping: "a dictionary",
    os.PathLike: "a path",
    str: "a text",
}


def check_arguments(kind: type, **arguments: object) -> None:
    """Refuse arguments that do not match a constructor's annotations."""
    constructor = kind.__init__  # type: ignore[misc]
    parameters = inspect.signature(constructor, eval_str=True).parameters
    for name, value in arguments.items():
        check_value(name, value, parameters[name].annotation)


def check_seconds(name: str, seconds: Any) -> None:
    """Refuse a value that is not a positive, finite number."""
    number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not number or not 0 < float(seconds) < math.inf:
        raise TowerError(
            f"{name}={seconds!r} is not allowed: give a number of seconds."
        )


def check_value(name: str, value: object, hint: Any) -> None:
    """Refuse a value that does not match its annotation."""
    if hint is float and name.endswith("_s"):
        return check_seconds(name, value)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    if not any(_matches(value, part) for part in parts):
        *most, last = itertools.chain(*map(_describe_type, parts))
        text = ", ".join(most) + ("," if len(most) > 1 else "")
        text = f"{text} or {last}" if most else last
        raise TowerError(f"{name}={value!r} is not allowed: give {text}.")


def _allowed_values(part: Any) -> tuple[object, ...]:
    """Return the values of a type that lists them; none for other types."""
    if typing.get_origin(part) is Literal:
        return typing.get_args(part)
    return {bool: (True, False), types.NoneType: (None,)}.get(part, ())


def _matches(value: object, part: Any) -> bool:
    if values := _allowed_values(part):
        return any(isinstance(value, type(v)) and value == v for v in values)
    if part in _NUMBERS:
        kind, _ = _NUMBERS[part]
        return isinstance(value, kind) and not isinstance(value, bool)
    return isinstance(value, typing.get_origin(part) or part)


def _describe_type(part: Any) -> list[str]:
    """Describe the values that match a part of an annotation."""
    if values := _allowed_values(part):
        return list(map(repr, values))
    if part in _NUMBERS:
        return [_NUMBERS[part][1]]
    kind = typing.get_origin(part) or part
    return [_NAMES.get(kind, f"a {kind.__name__}")]
