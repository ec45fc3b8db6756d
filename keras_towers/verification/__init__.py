"""Asking, before training, whether a model's step splits over towers."""

from __future__ import annotations

import operator
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import contract
from keras_towers.fit.calls import building
from keras_towers.fit.contract import Extent
from keras_towers.fit.verify import snapshot
from keras_towers.fit.verify import steps as steps_lib
from keras_towers.fit.weights import trainers
from keras_towers.strategies.options import Options
from keras_towers.verification import batches as batches_lib
from keras_towers.verification import findings as findings_lib
from keras_towers.verification.rehearsal import Rehearsal
from keras_towers.verification.report import Finding, Kind, Report

__all__ = ["Finding", "Kind", "Report", "verify"]


def verify(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    towers: int = 2,
    batch_size: int | None = None,
    steps: int = 3,
    average: bool = True,
    exact: bool = False,
    batch_norm: Extent | None = None,
    random: Extent = "global",
    tolerance: float | None = None,
) -> Report:
    """Check whether a model trains on towers as it does on one device.

    The training step is traced on towers as ``fit`` would, and analysed: it is
    proven to split, or the line of code is named where it does not. Then a few
    steps run on one device, and on towers that share it, and gradients, logs
    and written variables are compared. What differs by design, such as
    BatchNormalization, is a finding of its own, and made equal for the
    rehearsal. Afterwards weights, optimizers, metrics, random
    states and attributes are as before; a model that was not built is built.

    What ``fit`` would warn of is never called safe, unless it is only not
    proven. A generator loses the batches that are drawn.

    Args:
        model: a compiled model.
        x: data, as for ``fit``: arrays, dictionaries, datasets, generators.
            Use real examples: a loss may couple some batches and not others.
        y: targets, as for ``fit``.
        sample_weight: weights of the examples, as for ``fit``.
        towers: number of towers, at least 2.
        batch_size: examples in a batch of arrays; None: 32, or all if fewer.
        steps: how many steps to rehearse, each on a batch; one more has
            shares of different size, if these have not.
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
        training step gave what one device gives, and it is proven that it
        always does.
    """
    towers = _at_least("towers", towers, 2)
    steps = _at_least("steps", steps, 1)
    _check_model(model)
    options = Options(
        mode="cpu",
        packer=False,
        average=average,
        exact=exact,
        batch_norm=batch_norm,
        random=random,
    )
    data, specs = batches_lib.first(x, y, sample_weight, batch_size, steps)
    odd = batches_lib.unequal_rows(data, towers)
    if odd is not None:
        return Report(model.name, towers, (), (findings_lib.of_rows(*odd),))
    if model.run_eagerly or tf.config.functions_run_eagerly():
        specs = [None]
    tried = batches_lib.for_towers(data, specs[0], towers)
    with (
        compat.single_device_mode(),
        steps_lib.quietly(),
        snapshot.restored(model),
        trainers.without_xla(model),
    ):
        _build(model, tried[0])
        failed: Exception = ValueError("no batch")
        for spec in specs:
            tried = batches_lib.for_towers(data, spec, towers)
            rehearsal = Rehearsal(model, tried, spec, tolerance)
            try:
                wholes = rehearsal.on_one_device()
            except Exception as error:
                failed = error
                continue
            given, compared = rehearsal.on_towers(towers, options, wholes)
            seen = rehearsal.differences(wholes, compared.runs)
            found, unproven = findings_lib.of(model, given, compared, seen)
            sizes = tuple(map(batches_lib.size_of, tried))
            return Report(
                model.name, towers, sizes, tuple(found), tuple(unproven)
            )
        if specs == [None]:
            raise _fails(model, failed) from failed
        where = "in the graph that fit makes of it"
        finding = findings_lib.of_failure(model, failed, where)
        return Report(model.name, towers, (), (finding,))


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
    if not tf.distribute.has_strategy():
        trainers.leave_home(model)
    if tf.distribute.has_strategy() or contract.home_of(model) is not None:
        raise TowerError(
            f"verify was called in the scope of a strategy, or model "
            f"{model.name!r} is on one: call it before the `with` block."
        )


def _build(model: keras.Model, batch: Any) -> None:
    """Create all variables by a step, and leave the values they begin with."""

    def build(call: contract.UpdateCall) -> None:
        if not call.optimizer.built:
            call.optimizer.build(call.variables)

    before = snapshot.values_of(snapshot.all_of(model))
    new: dict[int, Any] = {}
    try:
        with steps_lib.eagerly(), snapshot.created() as new:
            steps_lib.RecordedStep(steps_lib.on_one_device(model, build))(batch)
        if building.needs_build(model, "fit"):
            # Its step does not call it, which nobody knows before.
            building.build(model, batch, "fit")
    except Exception as error:
        raise _fails(model, error) from error
    finally:
        snapshot.load(snapshot.all_of(model), {**new, **before})


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
