"""A few batches of the data that ``fit`` would get."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.data.iterator import Undistributed
from keras_towers.fit.data.rows import has_rows, names_of


def first(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    number: int,
) -> tuple[list[Any], list[Any]]:
    """Return up to ``number`` batches as ``fit`` gets them, and their specs."""
    if x is None:
        raise TowerError("verify got no data: give x, and y if fit gets one.")
    try:
        iterator = compat.TFEpochIterator(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            shuffle=False,
            distribute_strategy=Undistributed,
        )
    except ValueError as error:
        raise TowerError(
            f"verify could not read the data: {error} Give what fit gets."
        ) from error
    dataset = iterator._distributed_dataset
    found = list(dataset.take(number))
    if not found:
        raise TowerError("verify got no batch: the dataset is empty.")
    spec = dataset.element_spec
    if isinstance(x, tf.data.Dataset):
        return found, [spec]
    # The first spec that works is traced; batches after these may be smaller.
    return found, [tf.nest.map_structure(data_lib.of_any_size, spec), spec]


def for_towers(data: list[Any], spec: Any, towers: int) -> list[Any]:
    """Return batches that towers can share, and one of uneven shares."""
    found = [batch for batch in data if size_of(batch) >= towers]
    if not found:
        raise TowerError(
            f"verify got batches of {size_of(data[0])} examples for {towers} "
            "towers: give at least one for each tower."
        )
    largest = max(found, key=size_of)
    rows = size_of(largest)
    uneven = any(size_of(batch) % towers for batch in found)
    uniform = len(set(_rows_by_name(largest).values())) == 1
    if not uneven and rows > towers and uniform:
        odd = data_lib.few_rows(largest, rows - 1)
        if spec is None or _is_of(odd, spec):
            found.append(odd)
    return found


def size_of(batch: Any) -> int:
    """Return the number of examples of a batch."""
    return int(data_lib.batch_size_of(batch) or 1)


def unequal_rows(data: list[Any], towers: int) -> tuple[str, str] | None:
    """Name a part that towers cannot divide like the others, and say why."""
    for batch in data:
        rows = _rows_by_name(batch)
        if len(set(rows.values())) > 1 and math.gcd(*rows.values()) < towers:
            listed = ", ".join(f"{name}: {n}" for name, n in rows.items())
            size = next(iter(rows.values()))
            return next(name for name, n in rows.items() if n != size), (
                f"parts of a batch have different numbers of rows ({listed}), "
                f"which {towers} towers cannot divide alike"
            )
    return None


def _is_of(batch: Any, spec: Any) -> bool:
    leaves = zip(tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True)
    return all(part.is_compatible_with(leaf) for leaf, part in leaves)


def _rows_by_name(batch: Any) -> dict[str, int]:
    """Return the number of rows of each part of a batch that has rows."""
    parts = [leaf for leaf in tf.nest.flatten(batch) if has_rows(leaf)]
    rows = [int(data_lib.batch_size_of(part)) for part in parts]
    return dict(zip(names_of(batch), rows, strict=True))
