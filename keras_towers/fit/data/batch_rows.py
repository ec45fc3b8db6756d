"""Which parts of a batch have a row for each example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from keras_towers.fit import error_notes

_PARTS = ("x", "y", "sample_weight")
_SPLIT = (
    "If that shows in the first steps of a call, or is known before the batch "
    "is read, as with drop_remainder=True or tf.ensure_shape, towers divide "
    "what has a row for each example, and all get the rest."
)
_EACH = (
    'With batches="each" all parts need a row for each example; with '
    'batches="split" all towers can get the others as a whole.'
)
NO_ROWS: Final = -1
"""In place of a number of rows: no part has any."""


class RowCheck:
    """Tells which parts of a batch have a row for each example.

    Parts whose number of rows is known only at run time are assumed to have as
    many rows as the first part, unless a batch has shown otherwise. A step in
    which they differ fails.
    """

    def __init__(self) -> None:
        self._undivided: dict[tuple[str, ...], set[str]] = {}

    def see(self, batch: Any) -> set[str]:
        """Return which parts of batches with this structure are not divided."""
        names = names_of(batch)
        rows = {
            name: int(rows_of(leaf))
            for name, leaf in zip(names, tf.nest.flatten(batch), strict=True)
            if has_rows(leaf)
        }
        first = next(iter(rows.values()), 0)
        undivided = self._undivided.setdefault(tuple(names), set())
        undivided.update(name for name in rows if rows[name] != first)
        return undivided

    def divided_leaves(self, batch: Any) -> list[bool]:
        """Return for each leaf of a batch, or its specs, if it is divided."""
        first, names = first_rows_of(batch), names_of(batch)
        undivided = self._undivided.get(tuple(names), set())
        leaves = zip(names, tf.nest.flatten(batch), strict=True)
        return [
            is_divided(leaf, first) and name not in undivided
            for name, leaf in leaves
        ]

    def check(self, batch: Any) -> list[Any]:
        """Return assertions that all divided parts have equally many rows."""
        return self._check(batch, self.divided_leaves(batch), _SPLIT)

    def check_each(self, pieces: Sequence[Any]) -> list[Any]:
        """Like ``check``, for the K towers' batches."""
        checks = []
        for piece in pieces:
            leaves = map(has_rows, tf.nest.flatten(piece))
            checks += self._check(piece, list(leaves), _EACH)
        return checks

    def _check(
        self, batch: Any, chosen: Sequence[bool], advice: str
    ) -> list[Any]:
        """Compare the numbers of rows, unless they are static."""
        if first_rows_of(batch) is not None or sum(chosen) < 2:
            return []
        leaves = zip(
            names_of(batch), tf.nest.flatten(batch), chosen, strict=True
        )
        rows = {
            name: tf.cast(rows_of(leaf), tf.int64)
            for name, leaf, is_chosen in leaves
            if is_chosen
        }
        counts = list(rows.values())
        listed = ", ".join(f"{name} has {{}}" for name in rows)
        return error_notes.assert_for_user(
            tf.reduce_all(tf.stack(counts) == counts[0]),
            f"the parts of a batch have different numbers of rows: {listed}. "
            f"{advice} A dataset of single examples needs .batch(n).",
            counts,
        )


def first_rows_of(batch: Any) -> int | None:
    """Return the static number of rows of the first part that has rows."""
    for leaf in _with_rows(batch):
        return tf.TensorShape(leaf.shape)[0]
    return NO_ROWS


def is_divided(leaf: Any, rows: int | None) -> bool:
    """Whether a part of a batch, or its spec, has a row for each example.

    Args:
        leaf: the part.
        rows: the result of ``first_rows_of`` for the batch.
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
    """Name the leaves of a batch, as in ``fit(x, y)``."""
    names = []
    for path, _ in keras.tree.flatten_with_path(batch):
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
