"""Gradients of picking entries of each example by its own indices."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from keras_towers.splitting.values import Kind
from tests.splitting.kit import check, proven, rows


def _indices(*shape: int, high: int = 3) -> Any:
    return rows(*shape, dtype="int32", low=0, high=high)


def _gradient(x: Any, at: Any) -> Any:
    y = tf.gather(x, at, axis=1, batch_dims=1)
    return tf.gradients(tf.reduce_mean(y**2), [x])


@pytest.mark.parametrize("of", [(-1, 4), (-1, 4, 3)], ids=str)
@pytest.mark.parametrize("by", [(-1,), (-1, 2), (-1, 2, 2)], ids=str)
def test_gradients_of_picks(of, by):
    value = proven(_gradient, rows(*of), _indices(*by))
    assert value.rows.place == (0, 1, 1) and value.degree == -1


def _added_up(x: Any, at: Any, entries: int, step: int) -> Any:
    """What the gradient does, by hand."""
    n = tf.shape(x)[0]
    places = tf.range(n) * step + at
    return tf.math.unsorted_segment_sum(x, places, n * entries)


_HOSTILE = {
    "no pick": lambda x, y, at: _added_up(x[:, 0], at, 2, 2),
    "picks from more": lambda x, y, at: (
        _added_up(x, at, 2, 2)
        + tf.reduce_sum(tf.gather(y, at, axis=1, batch_dims=1))
    ),
    "overlapping": lambda x, y, at: (
        _added_up(x, at, 4, 3)
        + tf.reduce_sum(tf.gather(y, at, axis=1, batch_dims=1))
    ),
    "other indices": lambda x, y, at: (
        _added_up(x, at + 1, 4, 4)
        + tf.reduce_sum(tf.gather(y, at, axis=1, batch_dims=1))
    ),
}


@pytest.mark.parametrize("step", _HOSTILE.values(), ids=_HOSTILE)
def test_what_may_reach_other_examples(step):
    (value,) = check(step, rows(-1, 3), rows(-1, 4), _indices(-1, high=1))
    assert value.kind is Kind.OTHER
