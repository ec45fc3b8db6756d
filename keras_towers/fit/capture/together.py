"""Comparison of a run on a whole batch with runs on its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.fit.contract import NamedGradients
from keras_towers.fit.verify import compare
from keras_towers.fit.weights.variables import MEAN, SUM
from keras_towers.splitting import MEAN as MEAN_OF_TOWERS
from keras_towers.splitting import Difference, Result


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
        logs = [
            {name: pair[side] for name, pair in self._others.items()}
            for side in (0, 1)
        ]
        sizes = [
            *compare.gradients(*([calls] for calls in grads)).values(),
            *compare.logs(*logs).values(),
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
        self._of_state += [compare.values(before, after, own) for own in every]
        return bool(tf.reduce_any(before != after))


def _added_up(values: Any, places: Any, rows: int) -> Any:
    """Add rows of a gradient up by their indices."""
    total = np.zeros((rows, *values.shape[1:]), "float64")
    np.add.at(total, places, values)
    return total
