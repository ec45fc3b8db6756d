"""A few batches of the data that ``fit`` would get."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.data.rows import has_rows, names_of


class OneDevice:
    """A strategy stand-in that does not distribute datasets."""

    @staticmethod
    def experimental_distribute_dataset(dataset: Any) -> Any:
        """Return it as it is."""
        return dataset


def first(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    number: int,
) -> tuple[list[Any], Any]:
    """Return up to ``number`` batches of data, as a step gets them.

    And their spec, for which ``fit`` would trace the step.

    Args:
        x: as for ``fit``.
        y: as for ``fit``.
        sample_weight: as for ``fit``.
        batch_size: as for ``fit``.
        number: how many batches to draw.

    Raises:
        TowerError: there is no data.
    """
    if x is None:
        raise TowerError("verify got no data: give x, and y if fit gets one.")
    try:
        iterator = compat.TFEpochIterator(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            shuffle=False,
            distribute_strategy=OneDevice,
        )
    except ValueError as error:
        raise TowerError(
            f"verify could not read the data: {error} Give what fit gets."
        ) from error
    dataset = iterator._distributed_dataset
    found = list(dataset.take(number))
    if not found:
        raise TowerError("verify got no batch: the dataset is empty.")
    return found, dataset.element_spec


def rows_by_name(batch: Any) -> dict[str, int]:
    """Return the number of rows of each part of a batch that has rows."""
    parts = [leaf for leaf in tf.nest.flatten(batch) if has_rows(leaf)]
    rows = [int(data_lib.batch_size_of(part)) for part in parts]
    return dict(zip(names_of(batch), rows, strict=True))


def first_rows(batch: Any, count: int) -> Any:
    """Return the first rows of a batch, of every part that has rows."""
    return tf.nest.map_structure(
        lambda leaf: data_lib.first_rows(leaf, count), batch
    )
