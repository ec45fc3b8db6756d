"""Sizes of the differences between two runs of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.fit.contract import NamedGradients

Differences = dict[str, float]

# Gradients smaller than this part of the largest of all are compared with it:
# what is left of one that vanishes (a bias before BatchNormalization) is
# rounding.
_SMALLEST_GRADIENT = 1e-2
_SMALLEST_LOG = 1e-3
# Rounding of a value that is hardly changed.
_ROUNDING = 4e-6


def are_of_the_same(
    whole: Sequence[NamedGradients], other: Sequence[NamedGradients]
) -> bool:
    """Whether two steps update the same variables equally often."""
    return [call.names for call in whole] == [call.names for call in other]


def gradients(
    whole: Sequence[NamedGradients], other: Sequence[NamedGradients]
) -> Differences:
    """Return the largest relative difference of each variable's gradients."""
    found: Differences = {}
    for mine, theirs in zip(whole, other, strict=True):
        arrays = [_array(grad) for grad in mine.grads]
        largest = max((_size(a) for a in arrays if a is not None), default=0.0)
        for name, a, grad in zip(mine.names, arrays, theirs.grads, strict=True):
            b = _array(grad)
            if a is None or b is None:
                off = float((a is None) != (b is None))
            else:
                off = _off(a, b, max(_size(a), _SMALLEST_GRADIENT * largest))
            found[name] = max(found.get(name, 0.0), off)
    return found


def logs(whole: Mapping[str, Any], other: Mapping[str, Any]) -> Differences:
    """Compare the logs of a step."""
    return {
        name: _off(a, other[name], max(_size(a), _SMALLEST_LOG))
        if name in other
        else 1.0
        for name, a in whole.items()
    }


def values(before: Any, whole: Any, other: Any) -> float:
    """Compare a variable after two runs of a step, relative to its change."""
    if not whole.dtype.is_floating:
        return float(not np.array_equal(whole.numpy(), other.numpy()))
    a, b, start = (
        tf.cast(v, tf.float64).numpy() for v in (whole, other, before)
    )
    if a.shape != b.shape:
        return 1.0
    off = _off(a, b, 1.0)
    if off <= _ROUNDING * _size(a):
        return 0.0
    return off / max(_size(a - start), _ROUNDING * _size(a))


def _off(a: Any, b: Any, scale: float) -> float:
    if a.shape != b.shape:
        return 1.0
    a, b = a.astype("float64"), b.astype("float64")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    off = float(np.where(same, 0.0, np.abs(a - b)).max(initial=0.0))
    if not np.isfinite(off):
        return float("inf")
    return off / max(scale, 1e-30) if off else 0.0


def _size(array: Any) -> float:
    finite = np.where(np.isfinite(array), np.abs(array), 0.0)
    return float(finite.max(initial=0.0))


def _array(grad: Any) -> Any:
    return None if grad is None else tf.convert_to_tensor(grad).numpy()
