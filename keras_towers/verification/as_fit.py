"""What ``fit`` would warn of in a step, without training."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit import told
from keras_towers.fit.data.rows import RowCheck
from keras_towers.fit.step import draws
from keras_towers.fit.verify import anew, snapshot
from keras_towers.fit.weights import trainers
from keras_towers.verification import batches as batches_lib
from keras_towers.verification import wording
from keras_towers.verification.rehearsal import Options, SharedDeviceStrategy
from keras_towers.verification.remedies import (
    EAGER_DRAWS,
    MATCHED_DRAWS,
    REMEDIES,
)
from keras_towers.verification.report import Finding, Kind


def of_rows(data: list[Any], towers: int) -> list[Finding]:
    """Find what is told of parts that have different numbers of rows.

    Args:
        data: batches that can be divided among the towers.
        towers: their number.
    """
    check = RowCheck()
    with told.heard() as heard:
        for batch in data:
            rows = list(batches_lib.rows_by_name(batch).values())
            if len(set(rows)) > 1:
                check.units(batch, rows, towers)
    return [_finding(one, {}) for one in heard]


def of_step(
    model: keras.Model, options: Options, batch: Any, spec: Any
) -> list[Finding]:
    """Find what is told of a step: it is traced, or run if it is not traced.

    Args:
        model: the model, which is built, and all its optimizers.
        options: the strategy to verify for.
        batch: what its step takes.
        spec: the spec of all batches.

    Returns:
        A finding for each warning that results may differ from one device; or
        one of why there is no trace.
    """
    names = {
        id(variable): name
        for name, variable in snapshot.plain_variables_of(model).items()
    }
    # What the towers' step leaves in attributes are tensors of its graph.
    with snapshot.restored(model), told.heard() as heard:
        try:
            _run(model, options, batch, spec)
        except Exception as error:
            return [wording.of_trace(error)]
    return [_finding(one, names) for one in heard]


def _run(model: keras.Model, options: Options, batch: Any, spec: Any) -> None:
    strategy = SharedDeviceStrategy(options)
    eager = model.run_eagerly or tf.config.functions_run_eagerly()
    with strategy:
        step = strategy.step_of(model)
        if eager:
            step(batch)
            return
        with anew.traced(), trainers.without_xla(model):
            anew.trace(step, spec)


def _finding(one: told.Told, names: dict[int, str]) -> Finding:
    subject = one.subject
    if not isinstance(subject, str):
        subject = names.get(id(subject), subject.name)
    kind = Kind(one.about)
    remedy = REMEDIES[kind]
    if kind == Kind.RANDOM:
        remedy = EAGER_DRAWS if subject == draws.EAGER else MATCHED_DRAWS
    return Finding(kind, subject, f"fit warns: {one.message}", remedy)
