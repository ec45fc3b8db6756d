"""Sizes of the differences between two runs, or one and those of its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.fit.contract import NamedGradients
from keras_towers.fit.weights.variables import MEAN, SUM
from keras_towers.splitting import MEAN as MEAN_OF_TOWERS
from keras_towers.splitting import Difference, Result

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


@dataclasses.dataclass(frozen=True)
class Ran:
    """One run of a trace: outputs by tensor name, variables by key."""

    outputs: Mapping[str, Any]
    # Values of the variables that the run may have written.
    before: Mapping[str, Any]
    after: Mapping[str, Any]


class Together:
    """Compares a run on the whole with K runs on its parts."""

    def __init__(
        self,
        results: Iterable[Result],
        merges: Mapping[str, str | None],
        whole: Ran,
        parts: Sequence[Ran],
        shares: Sequence[float],
    ):
        self._results = {(one.what, one.name): one for one in results}
        # How the towers' variables are merged, by key.
        self._merges = merges
        self._whole, self._parts, self._shares = whole, parts, shares
        self._gradients: dict[str, tuple[Any, Any]] = {}
        self._others: dict[str, tuple[Any, Any]] = {}
        self._of_state: list[float] = []
        self._is_finite = True

    def difference(self, open_: Iterable[Difference]) -> float | None:
        """Return the largest relative difference; None: nothing to compare."""
        for one in open_:
            shown = [self._add_state(key) for key in one.variables]
            if not one.variables:
                found = (self._results[one.what, name] for name in one.names)
                shown = [self._add(result) for result in found]
            if not any(shown):
                return None
        grads = [
            NamedGradients(
                tuple(self._gradients),
                [pair[side] for pair in self._gradients.values()],
            )
            for side in (0, 1)
        ]
        others = [
            {name: pair[side] for name, pair in self._others.items()}
            for side in (0, 1)
        ]
        sizes = [
            *gradients(*([calls] for calls in grads)).values(),
            *logs(*others).values(),
            *self._of_state,
        ]
        # Values that are not finite cannot be compared.
        return max(sizes) if self._is_finite else None

    def _add(self, result: Result) -> bool:
        """Compare a result; return whether any value is not zero."""
        one, other = self._both(result)
        gradient = result.what == "gradient"
        found = self._gradients if gradient else self._others
        found[result.name] = one, other
        self._is_finite &= bool(np.isfinite(one).all())
        self._is_finite &= bool(np.isfinite(other).all())
        return bool(np.any(one))

    def _both(self, result: Result) -> tuple[Any, Any]:
        """Return a result of the whole, and of the parts together."""
        runs = (self._whole, *self._parts)
        one, *every = (run.outputs[result.tensor.name].numpy() for run in runs)
        if result.places is not None:
            of = [run.outputs[result.places.name].numpy() for run in runs]
            rows = 1 + max(int(places.max(initial=0)) for places in of)
            one, *every = (
                _added_up(values, places, rows)
                for values, places in zip((one, *every), of, strict=True)
            )
        if result.what == "output":
            return one, np.concatenate(every)
        if result.degree == MEAN_OF_TOWERS:
            weighted = zip(every, self._shares, strict=True)
            every = [own * share for own, share in weighted]
        return one, sum(every[1:], every[0])

    def _add_state(self, key: str) -> bool:
        """Compare a variable; return whether the run has changed it."""
        before, after = self._whole.before[key], self._whole.after[key]
        every = [part.after[key] for part in self._parts]
        merge = self._merges[key]
        if merge == SUM:
            every = [before + tf.add_n([own - before for own in every])]
        elif merge == MEAN:
            weighted = zip(every, self._shares, strict=True)
            every = [
                tf.add_n([own * tf.cast(s, own.dtype) for own, s in weighted])
            ]
        self._of_state += [values(before, after, own) for own in every]
        return bool(tf.reduce_any(before != after))


def _added_up(values: Any, places: Any, rows: int) -> Any:
    """Add rows of a gradient up by their indices."""
    total = np.zeros((rows, *values.shape[1:]), "float64")
    np.add.at(total, places, values)
    return total
