"""What a tensor is that may be either of two."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Shape,
    Value,
    common,
    other,
    same,
    total,
)


def nothing() -> Value:
    """Return the value of the elements of an empty list."""
    return same(None, key="nothing")


def joined(a: Value, b: Value) -> Value:
    """Return what may be either of two values."""
    for empty, value in ((a, b), (b, a)):
        if empty.kind is Kind.SAME and empty.key == "nothing":
            return value
    details: dict[str, Any] = {
        "shape": _joined_shapes(a.shape, b.shape),
        "known": a.known if _are_alike(a.known, b.known) else None,
    }
    if a == b:
        return a.with_(**details)
    for value in (a, b):
        if value.kind is Kind.OTHER:
            return value.with_(**details)
    if a.kind is b.kind is Kind.OPTIONAL and len(a.items) == len(b.items):
        pairs = zip(a.items, b.items, strict=True)
        return a.with_(items=tuple(joined(v, w) for v, w in pairs))
    if a.items != b.items:
        # Lists of different lengths.
        a, b = (dataclasses.replace(value, items=()) for value in (a, b))
    if {a.kind, b.kind} & {Kind.HANDLE, Kind.OPTIONAL}:
        return other("uses one of several variables")
    try:
        return _either(a, b).with_(**details)
    except DoesNotSplit as error:
        return other(str(error), **details)


def _are_alike(a: Any, b: Any) -> bool:
    return a is not None and b is not None and np.array_equal(a, b)


def _either(a: Value, b: Value) -> Value:
    for zero, value in ((a, b), (b, a)):
        if zero.degree is None and zero.kind is Kind.SAME:
            return value
    verb = "is one of two"
    if Kind.SUM in (a.kind, b.kind):
        if Kind.ROWS in (a.kind, b.kind):
            raise DoesNotSplit("is either a sum over the batch or an example")
        return total(common((a.degree_as_sum, b.degree_as_sum), verb))
    degree = common((a.degree, b.degree), verb)
    if a.kind is b.kind is Kind.SAME:
        return same(degree)
    if a.rows is None or b.rows is None or a.rows.axis != b.rows.axis:
        raise DoesNotSplit("holds examples along one axis or another")
    if a.rows.count != b.rows.count:
        raise DoesNotSplit("holds different numbers of rows of an example")
    if a.rows.unit != b.rows.unit:
        raise NotFollowed("holds entries of one kind or another")
    if a.rows.draw != b.rows.draw:
        raise DoesNotSplit("is either random numbers or something else")
    if a.rows.place != b.rows.place and not (a.rows.uniform or b.rows.uniform):
        raise DoesNotSplit("holds examples in different orders")
    return (b if a.rows.uniform else a).with_(degree=degree)


def _joined_shapes(a: Shape | None, b: Shape | None) -> Shape | None:
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(d if d == e else None for d, e in zip(a, b, strict=True))
