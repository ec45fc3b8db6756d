"""Asking, before training, whether a model's step splits over towers."""

from __future__ import annotations

import math
import operator
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import contract
from keras_towers.fit.contract import Extent
from keras_towers.fit.verify import layers as layers_lib
from keras_towers.fit.verify import runs, snapshot
from keras_towers.verification import as_fit, causes
from keras_towers.verification import batches as batches_lib
from keras_towers.verification.rehearsal import Options, Rehearsal
from keras_towers.verification.remedies import REMEDIES
from keras_towers.verification.report import Finding, Kind, Report

__all__ = ["Finding", "Kind", "Report", "verify"]

_IN_HALF_PRECISION = 3e-2
_IN_SINGLE_PRECISION = 1e-4


def verify(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    towers: int = 2,
    batch_size: int | None = None,
    batches: int = 3,
    average: bool = True,
    exact: bool = False,
    batch_norm: Extent | None = None,
    random: Extent | None = None,
    tolerance: float | None = None,
) -> Report:
    """Check whether a model trains on towers as it does on one device.

    On one device, the training step of the model runs on a few batches, and on
    towers that share this device. Gradients, logs and written variables are
    compared, and causes of differences are found by making one thing after
    another equal. Afterwards weights, optimizers, metrics, random states and
    attributes are as before; a model that was not built is built.

    The step runs eagerly. It is also traced once on towers, as ``fit`` would:
    what ``fit`` would warn of is never called safe. A generator loses the
    batches that are drawn.

    Args:
        model: a compiled model.
        x: data, as for ``fit``: arrays, dictionaries, datasets, generators.
            Use real examples: a loss may couple some batches and not others.
        y: targets, as for ``fit``.
        sample_weight: weights of the examples, as for ``fit``.
        towers: number of towers, at least 2.
        batch_size: examples in a batch of arrays; None: 32, or all if fewer.
        batches: how many batches to try.
        average: as for ``TowerStrategy``.
        exact: as for ``TowerStrategy``.
        batch_norm: as for ``TowerStrategy``.
        random: as for ``TowerStrategy``.
        tolerance: the largest relative difference that counts as rounding;
            None: 1e-4, or more if the model computes in half precision.

    Returns:
        A report, for ``print``.

    Raises:
        TowerError: the model is not compiled, is on towers, or fails on one
            device; there are too few data, or arguments are invalid.

    Example:
        >>> print(keras_towers.verify(model, x, y))
        my_model is safe to split: on 2 towers (batches of 32, 32, 32, 31) its
        training step gave what one device gives.
    """
    towers = _at_least("towers", towers, 2)
    batches = _at_least("batches", batches, 1)
    _check_model(model)
    options = Options(
        towers=towers,
        average=average,
        exact=exact,
        batch_norm=batch_norm or ("global" if exact else "tower"),
        random=random or ("global" if exact else "tower"),
    )
    data, spec = batches_lib.first(x, y, sample_weight, batch_size, batches)
    odd = _unequal_rows(data, towers)
    if odd is not None:
        return Report(model.name, towers, (), (odd,))
    with (
        compat.single_device_mode(),
        runs.quietly(),
        snapshot.restored(model),
    ):
        with runs.eagerly(), layers_lib.in_float32(model):
            if tolerance is None:
                half = layers_lib.computes_in_half(model)
                tolerance = _IN_HALF_PRECISION if half else _IN_SINGLE_PRECISION
            verification = _Verification(model, options, tolerance)
            verification.compare(data)
        verification.heed_fit(data, spec)
        return verification.report()


class _Verification:
    """Runs the batches one after the other, as in training."""

    def __init__(self, model: keras.Model, options: Options, tolerance: float):
        self._model = model
        self._options = options
        self._tolerance = tolerance
        self._sizes: list[int] = []
        self._found: dict[tuple[Kind, str], Finding] = {}
        self._told: list[Finding] = []

    def compare(self, data: list[Any]) -> None:
        """Compare towers with one device, on batches and a part of one."""
        towers = self._options.towers
        state = self._prepared(data[0])
        for batch in data:
            rows = _rows(batch)
            if rows < towers:
                continue
            even = rows - rows % (2 * towers) or rows - rows % towers
            even = even if _is_uniform(batch) else rows
            state = self._try(state, batch, even)
        if not self._sizes:
            raise TowerError(
                f"verify got batches of {_rows(data[0])} examples for {towers} "
                "towers: give at least one for each tower."
            )
        data = list(filter(_is_uniform, data))
        rows = max(map(_rows, data), default=0)
        if rows > towers and not self._has(_OF_GRADIENTS + _FATAL):
            # Shares of different size; what differs anyway differs here too.
            odd = rows - (rows % towers == 0)
            batch = max(data, key=_rows)
            self._try(state, batch, odd)

    def heed_fit(self, data: list[Any], spec: Any) -> None:
        """Add what ``fit`` would tell of differences that were not seen.

        Args:
            data: the batches.
            spec: the spec of all batches.
        """
        if self._has(_FATAL):
            return
        towers = self._options.towers
        batch = next(batch for batch in data if _rows(batch) >= towers)
        told = as_fit.of_step(self._model, self._options, batch, spec)
        told += as_fit.of_rows(data, towers)
        found = set(self._found)
        drawn = self._has((Kind.RANDOM,))
        for finding in dict.fromkeys(told):
            known = (finding.kind, finding.name) in found
            if not known and not (drawn and finding.kind == Kind.RANDOM):
                self._told.append(finding)

    def report(self) -> Report:
        """Return what was found."""
        kinds: dict[Kind, Finding] = {}
        listed = []
        for finding in self._found.values():
            known = kinds.setdefault(finding.kind, finding)
            if known is finding or finding.kind in _ONE_EACH:
                listed.append(finding)
        return Report(
            self._model.name,
            self._options.towers,
            tuple(self._sizes),
            (*listed, *self._told),
        )

    def _has(self, kinds: tuple[Kind, ...]) -> bool:
        return any(kind in kinds for kind, _ in self._found)

    def _try(self, state: Any, batch: Any, rows: int) -> Any:
        """Compare one batch; return the state after one device's step."""
        if rows != _rows(batch):
            batch = batches_lib.first_rows(batch, rows)
        self._sizes.append(rows)
        rehearsal = Rehearsal(self._model, state, batch, rows, self._options)
        if rehearsal.whole.error is not None:
            raise _fails(self._model, rehearsal.whole.error)
        for finding in causes.of(rehearsal, self._tolerance):
            self._found.setdefault((finding.kind, finding.name), finding)
        return rehearsal.whole.state

    def _prepared(self, batch: Any) -> dict[int, Any]:
        """Create all variables by a step; return the values they begin with."""
        model = self._model
        before = snapshot.values_of(snapshot.all_of(model))
        new: dict[int, Any] = {}
        try:
            with snapshot.created() as new:
                runs.on_one_device(model, batch, _build)
        except Exception as error:
            raise _fails(model, error) from error
        finally:
            snapshot.load(snapshot.all_of(model), {**new, **before})
        return snapshot.values_of(snapshot.all_of(model))


_ONE_EACH = (Kind.STATE, Kind.PLAIN_VARIABLE, Kind.LOG)
_OF_GRADIENTS = (Kind.COUPLES, Kind.SUM, Kind.MEAN, Kind.CHANGED_BY_HAND)
_FATAL = (Kind.FAILS, Kind.STATEFUL, Kind.FIXED_BATCH, Kind.UPDATES)


def _build(call: contract.UpdateCall) -> None:
    if not call.optimizer.built:
        call.optimizer.build(call.variables)


def _rows(batch: Any) -> int:
    return next(iter(batches_lib.rows_by_name(batch).values()), 1)


def _is_uniform(batch: Any) -> bool:
    """Whether all parts of a batch have the same number of rows."""
    return len(set(batches_lib.rows_by_name(batch).values())) == 1


def _unequal_rows(data: list[Any], towers: int) -> Finding | None:
    """Find parts of a batch that cannot be split alike."""
    for batch in data:
        rows = batches_lib.rows_by_name(batch)
        if len(set(rows.values())) > 1 and math.gcd(*rows.values()) < towers:
            listed = ", ".join(f"{name}: {n}" for name, n in rows.items())
            size = next(iter(rows.values()))
            name = next(name for name, n in rows.items() if n != size)
            message = (
                f"parts of a batch have different numbers of rows ({listed}), "
                f"which {towers} towers cannot divide alike"
            )
            return Finding(Kind.ROWS, name, message, REMEDIES[Kind.ROWS])
    return None


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TowerError(
            f"verify takes a compiled keras.Model, but got {model!r}."
        )
    if not model.compiled:
        raise TowerError(
            f"model {model.name!r} is not compiled: call model.compile(...) "
            "with an optimizer before verify."
        )
    if tf.distribute.has_strategy() or contract.home_of(model) is not None:
        raise TowerError(
            f"verify was called in the scope of a strategy, or model "
            f"{model.name!r} is on one: call it before the `with` block."
        )


def _fails(model: keras.Model, error: Exception) -> TowerError:
    said = f"{type(error).__name__}: {error}".strip()
    return TowerError(
        f"the training step of model {model.name!r} fails on one device, "
        f"before anything is split: {said}"
    )


def _at_least(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < least or isinstance(value, bool):
        raise TowerError(
            f"{name}={value!r} is not allowed: give a whole number, {least} or "
            "more."
        )
    return number
