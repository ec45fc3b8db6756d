"""Which parts of a batch have a row for each example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit import error_notes

_PARTS = ("x", "y", "sample_weight")
_SPLIT = (
    "If that shows in the first steps of a call, or is known before the batch "
    "is read, as with drop_remainder=True or tf.ensure_shape, towers divide "
    "what has a row for each example, and all get the rest."
)
EACH: str = (
    'With batches="each" all parts need a row for each example; with '
    'batches="split" all towers can get the others as a whole.'
)


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
        first, names = static_rows(batch), names_of(batch)
        undivided = self._undivided.get(tuple(names), set())
        leaves = zip(names, tf.nest.flatten(batch), strict=True)
        return [
            is_divided(leaf, first) and name not in undivided
            for name, leaf in leaves
        ]

    def check(self, batch: Any) -> list[Any]:
        """Return assertions that all divided parts have equally many rows."""
        return check_rows(batch, _SPLIT, self.divided_leaves(batch))


def check_rows(
    batch: Any, advice: str, chosen: Sequence[bool] | None = None
) -> list[Any]:
    """Return assertions that parts of a batch have equally many rows.

    Args:
        batch: the batch.
        advice: what to do otherwise, for the error.
        chosen: for each leaf, whether to look at it; None: all that have rows.
    """
    leaves_of_batch = tf.nest.flatten(batch)
    if chosen is None:
        chosen = list(map(has_rows, leaves_of_batch))
    named = zip(names_of(batch), leaves_of_batch, chosen, strict=True)
    leaves = {name: leaf for name, leaf, is_chosen in named if is_chosen}
    # No step needs to look at numbers that are static, and equal.
    static = {tf.TensorShape(leaf.shape)[0] for leaf in leaves.values()}
    if len(leaves) < 2 or (len(static) == 1 and None not in static):
        return []
    counts = [tf.cast(rows_of(leaf), tf.int64) for leaf in leaves.values()]
    listed = ", ".join(f"{name} has {{}}" for name in leaves)
    return error_notes.assert_for_user(
        tf.reduce_all(tf.stack(counts) == counts[0]),
        f"the parts of a batch have different numbers of rows: {listed}. "
        f"{advice} A dataset of single examples needs .batch(n).",
        counts,
    )


def refuse_without_rows(batch: Any) -> None:
    """Reject a tower's own batch if a part of it cannot be divided.

    Of several such batches it would not be known whose part counts.
    """
    for name, leaf in zip(names_of(batch), tf.nest.flatten(batch), strict=True):
        is_value = isinstance(leaf, tf.Tensor) and leaf.dtype != tf.variant
        if is_value and not has_rows(leaf):
            raise TowerError(f"part {name} of a batch has no rows. {EACH}")
        if has_rows(leaf) and not can_be_divided(leaf):
            raise TowerError(
                f"part {name} of a batch is ragged in several axes, and cannot "
                f"be divided. {EACH}"
            )


def first_with_rows(batch: Any) -> Any:
    """Return the first part of a batch, or spec, that has rows, or None.

    A part that cannot be divided tells nothing of a tower's number of rows, and
    is only returned if there is no other one.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if has_rows(leaf)]
    return next(filter(can_be_divided, leaves), next(iter(leaves), None))


def static_rows(batch: Any) -> int | None:
    """Return the static number of rows of a batch, or its specs, or None."""
    leaf = first_with_rows(batch)
    return None if leaf is None else tf.TensorShape(leaf.shape)[0]


def is_divided(leaf: Any, rows: int | None) -> bool:
    """Whether a part of a batch, or its spec, has a row for each example.

    Args:
        leaf: the part.
        rows: the static number of rows of the batch.
    """
    return (
        has_rows(leaf)
        and tf.TensorShape(leaf.shape)[0] == rows
        and can_be_divided(leaf)
    )


def can_be_divided(leaf: Any) -> bool:
    """Whether towers can divide a part of a batch that has rows, or its spec.

    If its rows are ragged rows themselves, all towers get all of them.
    """
    return getattr(leaf, "ragged_rank", 1) == 1


def rows_of(leaf: Any) -> tf.Tensor:
    """Return the number of rows of a tensor of any kind."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


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
