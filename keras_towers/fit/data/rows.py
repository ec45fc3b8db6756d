"""Numbers of rows in the parts of a batch, and their division among towers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit import told

_PARTS = ("x", "y", "sample_weight")


class RowCheck:
    """Checks that all parts of a batch can be split alike."""

    # Parts may have different numbers of rows, such as labelled and unlabelled
    # examples. Each is then split by its own rows, if every tower can get the
    # same fraction of each part.

    def __init__(self) -> None:
        self.refused: TowerError | None = None
        self._warned = False

    def units(self, batch: Any, rows: Sequence[Any], replicas: int) -> Any:
        """Return into how many equal units a batch can be divided."""
        # The rows of its parts are ints or scalar int64 tensors.
        if all(isinstance(count, int) for count in rows):
            return self._units(names_of(batch), rows, replicas)
        counts = tf.stack([tf.cast(count, tf.int64) for count in rows])
        names = names_of(batch)

        def uneven(found: Any) -> int:
            try:
                return self._units(names, found.numpy().tolist(), replicas)
            except TowerError as error:
                self.refused = error
                raise

        return tf.cond(
            tf.reduce_all(counts == counts[0]),
            lambda: counts[0],
            lambda: tf.ensure_shape(
                tf.py_function(uneven, [counts], tf.int64), ()
            ),
        )

    def _units(
        self, names: Sequence[str], rows: Sequence[int], replicas: int
    ) -> int:
        units = math.gcd(*rows)
        if len(set(rows)) == 1:
            return units
        listed = ", ".join(
            f"{name} has {count}"
            for name, count in zip(names, rows, strict=True)
        )
        parts = f"the parts of a batch have different numbers of rows: {listed}"
        if units < replicas:
            raise TowerError(
                f"{parts}, which {replicas} towers cannot share equally. A "
                "dataset of single examples needs .batch(n); a part whose rows "
                "belong to rows of another (nodes and edges of graphs) has to "
                "be a RaggedTensor with a row for each example; a table "
                "belongs in the model. Otherwise give numbers of rows with a "
                f"common divisor of at least {replicas} (drop_remainder=True), "
                'or batches="each", which splits nothing.'
            )
        if not self._warned:
            self._warned = True
            name = next(
                name
                for name, count in zip(names, rows, strict=True)
                if count != rows[0]
            )
            told.differs(
                "rows",
                name,
                f"{parts}. Each part is split over the towers by its own "
                "rows, which is right if every row is an example. A part whose "
                "rows belong to rows of another, or that is no batch, must not "
                "be split: make it a RaggedTensor with a row for each example, "
                "put it "
                'into the model, or use batches="each".',
            )
        return units


def names_of(batch: Any) -> list[str]:
    """Name the parts of a batch that have rows, as in ``fit(x, y)``."""
    names = []
    for path, leaf in keras.tree.flatten_with_path(batch):
        if not has_rows(leaf):
            continue
        first, *rest = path or (0,)
        if isinstance(batch, tuple) and len(batch) <= len(_PARTS):
            name = _PARTS[first]
        else:
            rest, name = [first, *rest] if path else [], "x"
        names.append(name + "".join(f"[{step!r}]" for step in rest))
    return names


def has_rows(leaf: Any) -> bool:
    """Whether a part of a batch, or its spec, has rows."""
    shape = getattr(leaf, "shape", None)
    return shape is not None and tf.TensorShape(shape).rank not in (0, None)
