"""The arithmetic of the field: which rows count, and their figures.

A result is the JSON entry of one row, for one model and number of devices.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from keras_towers.bench.field import curves
from keras_towers.bench.field.plan import FieldCell
from keras_towers.bench.field.rows import REFERENCE, ROWS
from keras_towers.bench.field.runner import FieldSample
from keras_towers.bench.results import Spread

FIGURES = (
    "step_ms",
    "examples_per_s",
    "efficiency",
    "compute_ms",
    "rest_ms",
    "first_step_s",
    "memory_mb",
)
# Cells by model, row, number of devices and repeat.
_Key = tuple[str, str, int, int]


def summarize_field(
    samples: Sequence[FieldSample], batch: int, most: int
) -> list[dict[str, Any]]:
    """Combine all repeats into one result per row, in the order of samples.

    Each figure is a ``Spread``, or None where it is not known or the row does
    not count. Figures are compared within a repeat:

    - ``examples_per_s``: those of the global batch by the median step.
    - ``efficiency``: that, divided by as much as so many devices would do, each
      like the one device on which the same backend trains on its own, if that
      counts.
    - ``compute_ms``: the step of as many processes of the same backend that
      each train on a share of the batch and exchange nothing.
    - ``rest_ms``: the step above that: the exchange, and all else that a
      strategy adds.

    Args:
        samples: all that was measured.
        batch: the global batch.
        most: the largest number of devices that do not share cores; with more
            there is no efficiency.
    """
    known = {_key(sample.cell): sample for sample in samples}
    rows: dict[tuple[str, int, str], list[FieldSample]] = {}
    for sample in samples:
        cell = sample.cell
        if cell.field_row.listed:
            key = (cell.model, cell.replicas, cell.row)
            rows.setdefault(key, []).append(sample)
    why_not = {
        key: next(filter(None, (_why_not(s, known) for s in repeats)), "")
        for key, repeats in rows.items()
    }
    results = []
    for (model, devices, row), repeats in rows.items():
        reason = why_not[model, devices, row]
        each: list[dict[str, float | None]] = []
        if not reason:
            single = (model, 1, ROWS[row].single)
            divides = devices <= most and not why_not.get(single)
            each = [_figures(s, known, batch, divides) for s in repeats]
        results.append(
            {
                "model": model,
                "devices": devices,
                "row": row,
                "counts": not reason,
                "reason": reason,
                **{
                    name: Spread.of(one[name] for one in each)
                    for name in FIGURES
                },
                "failed": any(sample.error for sample in repeats),
            }
        )
    return results


def _key(
    cell: FieldCell, row: str | None = None, replicas: int | None = None
) -> _Key:
    return (
        cell.model,
        row or cell.row,
        replicas or cell.replicas,
        cell.repeat,
    )


def _why_not(sample: FieldSample, known: dict[_Key, FieldSample]) -> str:
    """Say why a sample does not count, or nothing."""
    if sample.error:
        return "failed"
    reference = known.get(_key(sample.cell, REFERENCE, 1))
    if reference is None or reference.error:
        return "the reference failed"
    losses = reference.result["losses"]
    why = curves.difference(sample.result["losses"], losses)
    frozen = reference.result["frozen_losses"]
    if why or sample.cell.row == REFERENCE:
        return why
    return curves.undecided(losses, frozen)


def _figures(
    sample: FieldSample,
    known: dict[_Key, FieldSample],
    batch: int,
    divides: bool,
) -> dict[str, float | None]:
    cell, row = sample.cell, sample.cell.field_row
    step_ms = _step_ms(sample)
    single = _step_ms(known.get(_key(cell, row.single, 1)))
    compute = _step_ms(known.get(_key(cell, row.compute)))
    efficiency = None
    if divides and step_ms and single and cell.replicas > 1:
        efficiency = single / (cell.replicas * step_ms)
    return {
        "step_ms": step_ms,
        "examples_per_s": step_ms and 1e3 * batch / step_ms,
        "efficiency": efficiency,
        "compute_ms": compute,
        "rest_ms": step_ms - compute if step_ms and compute else None,
        "first_step_s": sample.result["first_step_s"],
        "memory_mb": sample.result["memory_mb"],
    }


def _step_ms(sample: FieldSample | None) -> float | None:
    if sample is None or sample.error:
        return None
    return statistics.median(sample.result["step_ms"])
