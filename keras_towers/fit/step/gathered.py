"""Whether the rows of a value are a tower's own, or those of the global batch.

What has been gathered, and all that is computed from it alone, is the same on
all towers already: gathering it again would repeat it once for each tower. A
value is therefore followed backwards through the graph of the step to what was
gathered before and to the tower's data. Where the two cannot be told apart, it
is refused.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit import told
from keras_towers.fit.context.origins import Origins
from keras_towers.fit.context.rows import NO_DIMENSION, Rows
from keras_towers.fit.context.tower import Tower
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.step import axes, slices
from keras_towers.fit.step.dimensions import (
    SAME,
    Dimension,
    Dimensions,
    outer,
    scaled,
)

_READS = ("ReadVariableOp", "VariableV2")

# What was gathered in a step, by the tower's replica context.
_before: weakref.WeakKeyDictionary[Any, list[tf.Tensor]] = (
    weakref.WeakKeyDictionary()
)

Blocks = tuple[int, ...]


def note(context: Any, values: list[Any]) -> None:
    """Record what a tower has been given."""
    _before.setdefault(context, []).extend(values)


@tf.autograph.experimental.do_not_convert
def blocks_of(
    context: Any, tower: Tower | None, value: tf.Tensor, what: str
) -> Blocks | None:
    """Tell how the rows of a value are those of the tower's examples.

    Args:
        tower: the tower; None in a custom training loop.
        value: a tensor of shape [rows, ...].

    Returns:
        The blocks of rows, as of a ``Dimension``; None if the value is the same
        on all towers.
    """
    before = _before.get(context, [])
    if any(value is whole for whole in before):
        return None
    if not hasattr(value, "graph"):
        return _by_size(before, tower, value, what)
    data = drawn = None
    if tower is not None:
        before, data, drawn = tower.common, tower.data, tower.rows
    rows = _Followed(before, data, drawn)
    origins = Origins(data)
    origins.note_common(before)
    gathered = Origins(before)
    common = gathered.depends_on_data(value)
    found = rows.of(value, 0)
    selects = found is None and rows.end_selects_own(gathered)
    joins = found is None and rows.joins()
    if not origins.depends_on_data(value):
        if rows.may_count_examples(found):
            raise _unknown(value, what)
        return None
    if any(
        isinstance(rows.of(value, axis), tuple)
        for axis in range(1, value.shape.rank)
    ):
        raise TowerError(
            f"{what} was given values of shape {value.shape}, one for each "
            "pair of the tower's own examples. Gather what they are computed "
            f"from, such as x, and compare x with {what}(x)."
        )
    if isinstance(found, tuple):
        return found
    if common and not selects:
        raise _unknown(value, what)
    if data is None and joins:
        _warn_of_order(what)
    return (1,)


def _unknown(value: tf.Tensor, what: str) -> TowerError:
    return TowerError(
        f"{what} was given values of shape {value.shape}, of which it is not "
        "known whether their rows are those of the tower's own examples, or "
        "the same on all towers, such as those that were gathered before. What "
        "is the same need not be gathered: use it as it is. Of the tower's own "
        "rows, gather what they are selected or joined from, and select or "
        "join afterwards; take their number from tf.shape(x), not from x.shape."
    )


def _by_size(
    before: list[tf.Tensor], tower: Tower | None, value: tf.Tensor, what: str
) -> Blocks:
    """Eager values show no origin: tell what can be told by their rows."""
    count = value.shape[0] or 0
    mine = tower and data_lib.static_size(tower.data)
    if mine and count > mine and count % mine == 0:
        _warn_of_order(what)
    if not before:
        return (1,)
    sizes = {whole.shape[0] or 0 for whole in before} - {0, mine}
    if any(count and count % size == 0 for size in sizes):
        raise TowerError(
            f"{what} was given {count} rows, where {max(sizes)} were gathered "
            "before. With run_eagerly=True it is not known whether these are "
            "the rows of the global batch, which need not be gathered: use "
            "them as they are. If they are several for each of the tower's own "
            "examples, gather all values in one call, or compile without "
            "run_eagerly, where this is known."
        )
    _warn(
        f"run_eagerly=True: {what} takes all rows for those of the tower's own "
        "examples, unless there are as many as in the global batch. What is "
        "computed from gathered rows alone must not be gathered again; without "
        "run_eagerly this is known for sure."
    )
    return (1,)


def _warn_of_order(what: str) -> None:
    _warn(
        f"several rows of each example are given to {what}, which keeps those "
        "of a tower together, as tf.repeat does. If they were joined by "
        "tf.concat, their order differs from one device: gather first, then "
        "join. Without run_eagerly, in fit, this is done in order."
    )


def _warn(message: str) -> None:
    told.differs("couples", "the step", message, once=message)


class _Followed(Dimensions):
    """Explains dimensions, also static ones, as far as that is certain.

    Args:
        data: the tower's data; None if it is not known.

    Attributes:
        end: where the last search gave up; None if that cannot be seen.
    """

    def __init__(self, before: list[Any], data: Any, drawn: Rows | None):
        super().__init__(drawn or Rows(0, 0, 0))
        self._known: dict[Any, tuple[int, Blocks]] = dict(self._rows.known)
        for leaf in tf.nest.flatten(data):
            if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
                self._known[leaf.ref()] = 0, (1,)
        for whole in before:
            self._known[whole.ref()] = NO_DIMENSION, ()
        self.end: Any = None
        self._anything = data is None
        self._each = None if data is None else data_lib.static_size(data)

    def may_count_examples(self, found: Dimension) -> bool:
        """Whether a constant may have been computed from a static shape."""
        if not isinstance(found, int):
            return False
        return self._anything or (
            self._each is not None and found % self._each == 0
        )

    def joins(self) -> bool:
        """Whether the last search ended where values are joined."""
        return self.end is not None and self.end.op.type == "ConcatV2"

    def end_selects_own(self, gathered: Origins) -> bool:
        """Whether the last search ended where own rows are selected."""
        end = self.end
        if end is None:
            return False
        if not gathered.depends_on_data(end):
            return True
        found = [self.of(t, 0) for t in end.op.inputs if t.shape.rank]
        others = [size for size in found if not isinstance(size, tuple)]
        self.end = end
        return len(others) < len(found) and all(
            isinstance(size, int) for size in others
        )

    def of(self, tensor: Any, axis: int) -> Dimension:
        """Explain one dimension of a tensor."""
        found = self._one(tensor, axis)
        while isinstance(found, slices.From):
            if found.scale != 1:
                return scaled(self.of(found.tensor, found.axis), found.scale)
            found = self._one(found.tensor, found.axis)
        return found

    def of_any(self, tensors: list[Any], axis: int) -> Dimension:
        """Explain a dimension that several tensors have."""
        # A constant may be as long by chance.
        found = [self.of(tensor, axis) for tensor in tensors]
        known = [size for size in found if not isinstance(size, int)]
        if not known:
            return found[0]
        return known[0] if all(size == known[0] for size in known) else None

    def _one(self, tensor: Any, axis: int) -> Any:
        inside, tensor = tensor, outer(tensor)
        if tensor is None:
            self.end = inside if hasattr(inside, "graph") else None
            return None
        known = self._known.get(tensor.ref())
        size = tensor.shape[axis] if tensor.shape.rank else None
        if known is not None:
            place, blocks = known
            if place == NO_DIMENSION:
                return SAME
            return blocks if axis == place else (size or SAME)
        kind = tensor.op.type
        if kind in _READS or tensor.dtype == tf.resource:
            return SAME
        if size == 1 or kind == "Const":
            return size
        found = None
        if not axes.is_assumed(tensor, axis) and tensor.op.inputs:
            found = axes.source(self, tensor, axis)
        if found is None:
            self.end = tensor
        return found
