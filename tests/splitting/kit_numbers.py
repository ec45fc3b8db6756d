"""Numbers of a given kind, for one device and for towers."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.splitting.places import Ends
from keras_towers.splitting.values import Kind, Rows, Value

_WORDS = ["a", "B c", "12", " d ", "eeE", "7"]


@dataclasses.dataclass(frozen=True)
class Made:
    """A tensor of one device, and the towers' parts of it."""

    whole: Any
    parts: list[Any]


def made(
    given: Any,
    counts: Sequence[int],
    generator: np.random.Generator,
    order: Callable[[Any], tuple[int, int] | None],
) -> Made:
    """Make a tensor of a kind, and the towers' parts of it.

    Args:
        given: what it is.
        counts: the towers' numbers of examples.
        generator: draws its entries.
        order: returns the order of the rows of a draw.
    """
    value = given.value
    if isinstance(value.meaning, Ends):
        lengths = _lengths(value.meaning.unit, sum(counts))
        return Made(
            _ends(lengths, given),
            [_ends(part, given) for part in _split(lengths, counts)],
        )
    if value.kind is Kind.ROWS:
        return _rows(given, counts, generator, order)
    whole = sum(counts)
    scales = [_scale(given, count, whole) for count in counts]
    if value.kind is Kind.SAME:
        base = _random(given, given.shape, generator)
        return Made(
            _as(base * _scale(given, whole, whole), base),
            [_as(base * scale, base) for scale in scales],
        )
    bases = [_random(given, given.shape, generator) for _ in counts]
    parts = [_as(b * s, b) for b, s in zip(bases, scales, strict=True)]
    last = _scale(given, whole, whole)
    return Made(_as(sum(bases) * last, bases[0]), parts)


def _lengths(unit: Any, count: int) -> Any:
    """How many entries each example has; the same for all that ask."""
    generator = np.random.default_rng([zlib.crc32(str(unit).encode()), count])
    return generator.integers(0, 4, count)


def _split(rows: Any, counts: Sequence[int], axis: int = 0) -> list[Any]:
    return np.split(rows, np.cumsum(counts)[:-1], axis)


def _ends(lengths: Any, given: Any) -> Any:
    return np.cumsum([0, *lengths]).astype(given.dtype)


def _rows(
    given: Any,
    counts: Sequence[int],
    generator: np.random.Generator,
    order: Callable[[Any], tuple[int, int] | None],
) -> Made:
    place: Rows = given.value.rows
    outer, inner = place.outer, place.inner
    if place.draw is not None:
        outer, inner = order(place.draw) or (1, place.count)
    ahead, behind = given.shape[: place.axis], given.shape[place.axis + 1 :]
    whole = sum(counts)
    scales = [_scale(given, count, whole) for count in counts]
    own = _scale(given, whole, whole)
    if place.unit is not None:
        lengths = _lengths(place.unit, whole)
        counts = [int(sum(part)) for part in _split(lengths, counts)]
        whole = sum(counts)
    sizes = (1, 1, 1) if place.uniform else (outer, whole, inner)
    base = _random(given, (*ahead, *sizes, *behind), generator)
    shape = (*ahead, outer, whole, inner, *behind)
    base = np.broadcast_to(base, shape)
    axis = len(ahead) + 1
    parts = _split(base, counts, axis)
    return Made(
        _as(base * own, base).reshape(*ahead, outer * whole * inner, *behind),
        [
            _as(part * scale, base).reshape(
                *ahead, outer * count * inner, *behind
            )
            for part, scale, count in zip(parts, scales, counts, strict=True)
        ],
    )


def _scale(given: Any, count: int, whole: int) -> Any:
    """What an entry is multiplied with in a tower of some of the examples."""
    degree = given.value.degree
    if degree is None:
        return 0
    if not degree:
        return 1
    if tf.as_dtype(given.dtype).is_integer:
        assert degree > 0
        return count**degree
    return (count / whole) ** float(degree)


def _as(array: Any, like: Any) -> Any:
    return np.asarray(array).astype(like.dtype)


def _random(given: Any, shape: Sequence[int], generator: Any) -> Any:
    dtype = tf.as_dtype(given.dtype)
    if dtype == tf.string:
        return _Words(generator.choice(_WORDS, shape))
    if dtype.is_bool:
        return generator.integers(0, 2, shape).astype(bool)
    if dtype.is_integer:
        drawn = generator.integers(int(given.low), int(given.high) + 1, shape)
    else:
        drawn = generator.uniform(given.low, given.high, shape)
    if dtype.is_complex:
        drawn = drawn + 1j * generator.uniform(given.low, given.high, shape)
    return drawn.astype(dtype.as_numpy_dtype)


class _Words(np.ndarray):
    """Texts, which nothing scales."""

    def __new__(cls, array: Any) -> Any:
        return np.asarray(array, dtype=object).view(cls)

    def __mul__(self, other: Any) -> Any:
        return self


def whole_of(
    value: Value,
    parts: list[Any],
    counts: Sequence[int],
    tolerance: float,
    said: str,
) -> Any:
    """Return what one device has to have, if the towers have these parts.

    Returns:
        It, or None: nothing is known.
    """
    if value.kind is Kind.OTHER:
        return None
    if value.degree is None:
        for part in parts:
            assert not part.any(), said
    scaled = parts
    if value.degree:
        degree = float(value.degree)
        scaled = [
            part * (sum(counts) / count) ** degree
            for part, count in zip(parts, counts, strict=True)
        ]
    if value.kind is Kind.SUM:
        assert scaled[0].dtype.kind != "b" or value.degree is None, said
        return sum(scaled[1:], scaled[0])
    if value.kind is Kind.SAME:
        for part in scaled[1:]:
            assert part.shape == scaled[0].shape, (said, part.shape)
            assert_alike(part, scaled[0], tolerance, said)
        return scaled[0]
    return _joined(value, scaled, counts, said)


def assert_alike(a: Any, b: Any, tolerance: float, said: str) -> None:
    """Check that two arrays have the same entries, up to rounding errors."""
    if a.dtype.kind in "fciu" and b.dtype.kind in "fciu":
        whole = a.dtype.kind in "iu" or b.dtype.kind in "iu"
        own = 1e-9 if whole else tolerance
        np.testing.assert_allclose(a, b, own, own, err_msg=said)
    else:
        np.testing.assert_array_equal(a, b, said)


def _joined(
    value: Value, parts: list[Any], counts: Sequence[int], said: str
) -> Any:
    place = value.rows
    assert place is not None
    axis = place.axis
    blocks = []
    for part, count in zip(parts, counts, strict=True):
        ahead, behind = part.shape[:axis], part.shape[axis + 1 :]
        if place.unit is not None:
            count = part.shape[axis] // place.count
        assert part.shape[axis] == place.count * count, (said, part.shape)
        if place.uniform and part.shape[axis]:
            first = np.broadcast_to(np.take(part, [0], axis), part.shape)
            assert_alike(part, first, 1e-5, f"{said}: not uniform")
        blocks.append(
            part.reshape(*ahead, place.outer, count, place.inner, *behind)
        )
    joined = np.concatenate(blocks, axis + 1)
    return joined.reshape(*ahead, sum(p.shape[axis] for p in parts), *behind)
