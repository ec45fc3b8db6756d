"""Which parts of a batch have a row for each example."""

from __future__ import annotations

from typing import Any, Final

import keras
import tensorflow as tf

from keras_towers.errors import TowerError

_PARTS = ("x", "y", "sample_weight")
NO_ROWS: Final = -1
"""In place of a number of rows: no part has any."""


class RowCheck:
    """Checks numbers of rows that are known only when a step runs."""

    def __init__(self) -> None:
        self.refused: TowerError | None = None

    def checked(self, batch: Any, size: tf.Tensor) -> tf.Tensor:
        """Return the number of examples, once all parts have as many rows."""
        first = first_rows_of(batch)
        leaves = [
            leaf for leaf in tf.nest.flatten(batch) if is_divided(leaf, first)
        ]
        if len(leaves) < 2:
            return size
        counts = tf.stack([tf.cast(rows_of(leaf), tf.int64) for leaf in leaves])
        names = [
            name
            for name, leaf in zip(
                names_of(batch), _with_rows(batch), strict=True
            )
            if is_divided(leaf, first)
        ]

        def refuse(found: Any) -> int:
            listed = ", ".join(
                f"{name} has {count}"
                for name, count in zip(names, found.numpy(), strict=True)
            )
            self.refused = TowerError(
                f"the parts of a batch have different numbers of rows: "
                f"{listed}. Where each is known before the batch is read, as "
                "with drop_remainder=True or tf.ensure_shape, towers divide "
                "what has a row for each example, and all get the rest. A "
                "dataset of single examples needs .batch(n)."
            )
            raise self.refused

        return tf.cond(
            tf.reduce_all(counts == counts[0]),
            lambda: counts[0],
            lambda: tf.ensure_shape(
                tf.py_function(refuse, [counts], tf.int64), ()
            ),
        )


def first_rows_of(batch: Any) -> int | None:
    """Return the static number of rows of the first part that has rows."""
    for leaf in _with_rows(batch):
        return tf.TensorShape(leaf.shape)[0]
    return NO_ROWS


def is_divided(leaf: Any, rows: int | None) -> bool:
    """Whether a part of a batch, or its spec, has a row for each example.

    Args:
        leaf: it.
        rows: what ``first_rows_of`` says of the batch.
    """
    return (
        has_rows(leaf)
        and tf.TensorShape(leaf.shape)[0] == rows
        and getattr(leaf, "ragged_rank", 1) == 1
    )


def rows_of(leaf: Any) -> tf.Tensor:
    """Return the number of rows of a tensor of any kind."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def _with_rows(batch: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch) if has_rows(leaf)]


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
