"""Compares what the rules say with what happens: split, and whole.

A tensor of a given kind is made for one device and for towers with different
numbers of examples. A function of such tensors is traced once. What the
analysis says of its outputs has to hold of the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.splitting.interpreter import Interpreter
from keras_towers.splitting.sizes import EXAMPLES
from keras_towers.splitting.values import Kind, Rows, Value

TOWERS = (5, 3)


@dataclasses.dataclass(frozen=True)
class Given:
    """An input: its kind, and its shape, in which -1 is the examples' axis."""

    value: Value
    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0

    @property
    def spec(self) -> tf.TensorSpec:
        sizes = [None if size == -1 else size for size in self.shape]
        return tf.TensorSpec(sizes, self.dtype)

    @property
    def described(self) -> Value:
        rows = self.value.rows
        count = 1 if rows is None else rows.count
        sizes = [count * EXAMPLES if s == -1 else s for s in self.shape]
        return dataclasses.replace(self.value, shape=tuple(sizes))


def rows(
    *shape: int, outer: int = 1, inner: int = 1, degree: Any = 0, **options: Any
) -> Given:
    """An input with rows of examples where the shape has -1."""
    place = Rows(shape.index(-1), outer, inner)
    return Given(Value(Kind.ROWS, degree, place), shape, **options)


def same(*shape: int, degree: Any = 0, **options: Any) -> Given:
    """An input that all towers have."""
    return Given(Value(Kind.SAME, degree), shape, **options)


def total(*shape: int, degree: Any = 0, **options: Any) -> Given:
    """An input that is a sum over examples."""
    return Given(Value(Kind.SUM, degree), shape, **options)


def check(
    function: Callable[..., Any],
    *given: Given,
    towers: Sequence[int] = TOWERS,
    seed: int = 0,
    tolerance: float = 2e-4,
) -> list[Value]:
    """Check what the analysis says of a function; return what it says."""
    traced = tf.function(function, autograph=False).get_concrete_function(
        *(g.spec for g in given)
    )
    graph: Any = traced.graph
    inputs = [g.described for g in given]
    values = Interpreter({}).call(graph, inputs)
    generator = np.random.default_rng(seed)
    made = [_made(g, towers, generator) for g in given]
    whole = tf.nest.flatten(traced(*(tf.constant(one) for one, _ in made)))
    parts = [
        tf.nest.flatten(traced(*(tf.constant(each[k]) for _, each in made)))
        for k in range(len(towers))
    ]
    for index, value in enumerate(values):
        mine = [np.asarray(part[index]) for part in parts]
        expected = _global(value, mine, towers)
        if expected is None:
            continue
        actual = np.asarray(whole[index])
        assert actual.shape == expected.shape, (value, actual.shape)
        if actual.dtype.kind in "fc":
            np.testing.assert_allclose(
                expected, actual, rtol=tolerance, atol=tolerance, err_msg=str(value)
            )
        else:
            np.testing.assert_array_equal(expected, actual, str(value))
    return values


def proven(function: Callable[..., Any], *given: Given, **options: Any) -> Value:
    """Check a function of one output, of which something has to be known."""
    (value,) = check(function, *given, **options)
    assert value.kind is not Kind.OTHER, value
    return value


def refused(function: Callable[..., Any], *given: Given) -> str:
    """Check that nothing is said of a function; return why."""
    (value,) = check(function, *given)
    assert value.reason is not None, value
    return value.reason.text


def _scale(value: Value, count: int, towers: Sequence[int]) -> float:
    degree = float(value.degree or 0)
    return (count / sum(towers)) ** degree


def _random(given: Given, shape: Sequence[int], generator: Any) -> Any:
    if given.dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if given.dtype.startswith(("int", "uint")):
        return generator.integers(int(given.low), int(given.high), shape).astype(given.dtype)
    return generator.uniform(given.low, given.high, shape).astype(given.dtype)


def _made(given: Given, towers: Sequence[int], generator: Any) -> tuple[Any, list[Any]]:
    """Make a tensor of one device and those of the towers."""
    value = given.value
    if value.rows is None:
        if value.kind is Kind.SAME:
            one = _random(given, given.shape, generator)
            each = [_like(one * _scale(value, n, towers), one) for n in towers]
            return one, each
        each = [_random(given, given.shape, generator) for _ in towers]
        whole = sum(
            part / _scale(value, n, towers)
            for part, n in zip(each, towers, strict=True)
        )
        return _like(whole, each[0]), each
    place = value.rows
    axis = place.axis
    shape = [s for s in given.shape]
    split = [*shape[:axis], place.outer, sum(towers), place.inner, *shape[axis + 1 :]]
    one = _random(given, split, generator)
    bounds = np.cumsum(towers)[:-1]
    each = [
        _like(
            part.reshape([*shape[:axis], -1, *shape[axis + 1 :]])
            * _scale(value, n, towers),
            one,
        )
        for part, n in zip(np.split(one, bounds, axis + 1), towers, strict=True)
    ]
    return one.reshape([*shape[:axis], -1, *shape[axis + 1 :]]), each


def _like(array: Any, other: Any) -> Any:
    return np.asarray(array).astype(other.dtype)


def _global(value: Value, parts: list[Any], towers: Sequence[int]) -> Any:
    """What one device has to have, if the towers have these; None: anything."""
    if value.kind is Kind.OTHER:
        return None
    scaled = parts
    if value.degree:
        scaled = [
            part / _scale(value, n, towers)
            for part, n in zip(parts, towers, strict=True)
        ]
    if value.degree is None:
        for part in parts:
            assert not part.any()
    if value.kind is Kind.SAME:
        np.testing.assert_allclose(scaled[0], scaled[1], rtol=2e-4, atol=2e-4) if scaled[0].dtype.kind in "fc" else np.testing.assert_array_equal(scaled[0], scaled[1])
        return scaled[0]
    if value.kind is Kind.SUM:
        return sum(scaled)
    place = value.rows
    assert place is not None
    axis = place.axis
    blocks = []
    for part, n in zip(scaled, towers, strict=True):
        shape = part.shape
        assert shape[axis] == place.count * n, (value, shape)
        blocks.append(
            part.reshape([*shape[:axis], place.outer, n, place.inner, *shape[axis + 1 :]])
        )
    joined = np.concatenate(blocks, axis + 1)
    shape = parts[0].shape
    return joined.reshape([*shape[:axis], -1, *shape[axis + 1 :]])
