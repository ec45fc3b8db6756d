"""Numbers of a given kind, for one device and for towers."""

import dataclasses
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.splitting.places import Ends
from keras_towers.splitting.values import Kind

_TOLERANCE = 3e-4
_WORDS = ["a", "B c", "12", " d ", "eeE", "7"]


@dataclasses.dataclass(frozen=True)
class Made:
    """A tensor of one device, and the towers' parts of it."""

    whole: Any
    parts: list[Any]


def made(given, counts, generator, order):
    """Make a tensor of a kind, and the towers' parts of it.

    Args:
        given: what it is.
        counts: the towers' numbers of examples.
        generator: draws its entries.
        order: returns the order of the rows of a draw.
    """
    value, whole = given.value, sum(counts)
    if isinstance(value.meaning, Ends):
        lengths = _lengths(value.meaning.unit, whole)
        every = [lengths, *_split(lengths, counts)]
        ends = [np.cumsum([0, *e]).astype(given.dtype) for e in every]
        return Made(ends[0], ends[1:])
    scales = [_scale(given, count, whole) for count in (*counts, whole)]
    if value.kind is Kind.ROWS:
        return _rows(given, counts, scales, generator, order)
    if value.kind is Kind.SAME:
        base = _random(given, given.shape, generator)
        *parts, last = (_as(base * scale, base) for scale in scales)
        return Made(last, parts)
    bases = [_random(given, given.shape, generator) for _ in counts]
    parts = [_as(b * s, b) for b, s in zip(bases, scales, strict=False)]
    return Made(_as(sum(bases) * scales[-1], bases[0]), parts)


def _lengths(unit, count):
    """How many entries each example has; the same for all that ask."""
    generator = np.random.default_rng([zlib.crc32(str(unit).encode()), count])
    return generator.integers(0, 4, count)


def _split(rows, counts, axis=0):
    return np.split(rows, np.cumsum(counts)[:-1], axis)


def _rows(given, counts, scales, generator, order):
    place = given.value.rows
    outer, inner = place.outer, place.inner
    if place.draw is not None:
        outer, inner = order(place.draw) or (1, place.count)
    ahead, behind = given.shape[: place.axis], given.shape[place.axis + 1 :]
    if place.unit is not None:
        lengths = _lengths(place.unit, sum(counts))
        counts = [int(sum(part)) for part in _split(lengths, counts)]
    shape = (*ahead, outer, sum(counts), inner, *behind)
    drawn = (*ahead, 1, 1, 1, *behind) if place.uniform else shape
    base = np.broadcast_to(_random(given, drawn, generator), shape)
    every = [*_split(base, counts, len(ahead) + 1), base]
    *parts, whole = (
        _as(part * scale, base).reshape(*ahead, -1, *behind)
        for part, scale in zip(every, scales, strict=True)
    )
    return Made(whole, parts)


def _scale(given, count, whole):
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


def _as(array, like):
    return np.asarray(array).astype(like.dtype)


def _random(given, shape, generator):
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

    def __new__(cls, array):
        return np.asarray(array, dtype=object).view(cls)

    def __mul__(self, other):
        return self


def check_parts(value, whole, parts, counts):
    """Check what one device and towers have against what is said of it."""
    said = f"{value} of towers with {counts}"
    if value.kind is Kind.OTHER:
        return
    if value.degree is None:
        for part in parts:
            assert not part.any(), said
    if value.degree:
        degree = float(value.degree)
        parts = [
            part * (sum(counts) / count) ** degree
            for part, count in zip(parts, counts, strict=True)
        ]
    expected = parts[0]
    if value.kind is Kind.SUM:
        assert parts[0].dtype.kind != "b" or value.degree is None, said
        expected = sum(parts[1:], parts[0])
    elif value.kind is Kind.SAME:
        for part in parts[1:]:
            assert_alike(part, parts[0], said)
    else:
        expected = _joined(value.rows, parts, counts, said)
    assert_alike(whole, expected, said)


def assert_alike(a, b, said):
    """Check that two arrays are the same, up to rounding errors."""
    assert a.shape == b.shape, (said, a.shape, b.shape)
    if a.dtype.kind in "fciu" and b.dtype.kind in "fciu":
        whole = a.dtype.kind in "iu" or b.dtype.kind in "iu"
        own = 1e-9 if whole else _TOLERANCE
        np.testing.assert_allclose(a, b, own, own, err_msg=said)
    else:
        np.testing.assert_array_equal(a, b, said)


def _joined(place, parts, counts, said):
    axis, blocks = place.axis, []
    for part, count in zip(parts, counts, strict=True):
        ahead, behind = part.shape[:axis], part.shape[axis + 1 :]
        if place.unit is not None:
            count = part.shape[axis] // place.count
        assert part.shape[axis] == place.count * count, (said, part.shape)
        if place.uniform and part.shape[axis]:
            first = np.broadcast_to(np.take(part, [0], axis), part.shape)
            assert_alike(part, first, f"{said}: not uniform")
        split = (place.outer, count, place.inner)
        blocks.append(part.reshape(*ahead, *split, *behind))
    joined = np.concatenate(blocks, axis + 1)
    return joined.reshape(*ahead, sum(p.shape[axis] for p in parts), *behind)
