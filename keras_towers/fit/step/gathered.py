"""Whether the rows of a value are a tower's own, or those of the global batch.

Gathered values, and values computed from them alone, are the same on all
towers: gathering them again would repeat their rows once for each tower. A
value is therefore followed backwards through the graph of the step to gathered
values and to the tower's data. A value that may follow from either is refused.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import told
from keras_towers.fit.context.tower import Tower
from keras_towers.fit.data import batches as data_lib
from keras_towers.partition.sizes import degree_of
from keras_towers.splitting.growing import Growing
from keras_towers.splitting.values import Value

# What was gathered in a step, by the tower's replica context.
_before: weakref.WeakKeyDictionary[Any, list[tf.Tensor]] = (
    weakref.WeakKeyDictionary()
)

Blocks = tuple[int, ...]


def note(context: Any, values: list[Any]) -> None:
    """Record gathered values, which are the same on all towers."""
    _before.setdefault(context, []).extend(values)


@tf.autograph.experimental.do_not_convert
def blocks_of(
    context: Any, tower: Tower | None, value: tf.Tensor, what: str
) -> Blocks | None:
    """Return each block's rows per example; None: the same on all towers."""
    # Without a tower this is a custom training loop.
    before = _before.get(context, [])
    if any(value is whole for whole in before):
        return None
    if not hasattr(value, "graph"):
        return _by_size(before, tower, value, what)
    if tower is None:
        values = Growing()
        values.note_common(before)
    else:
        before, values = tower.common, tower.values
    found = values.value_of(value)
    if found.is_same:
        if _may_count_examples(value, tower, before):
            raise _unknown(value, what)
        return None
    if tower is not None and data_lib.static_size(tower.data) is not None:
        return _by_size(before, tower, value, what)
    if _is_of_pairs(found, values):
        raise TowerError(
            f"{what} was given values of shape {value.shape}, one for each "
            "pair of the tower's own examples. Gather what they are computed "
            f"from, such as x, and compare x with {what}(x)."
        )
    rows = found.rows
    if rows is not None and rows.axis == 0 and rows.draw is None:
        # Of parts of the examples nobody knows how many each tower has.
        return (rows.inner,) * rows.outer if rows.unit is None else (1,)
    if _follows(value, before) and not _selects_own(found, values, before):
        raise _unknown(value, what)
    if tower is None and _joins(found):
        _warn_of_order(what)
    return (1,)


def _may_count_examples(
    value: tf.Tensor, tower: Tower | None, before: list[tf.Tensor]
) -> bool:
    """Whether a constant may have been computed from a static shape."""
    size = value.shape[0]
    if size is None or any(whole.shape[:1] == [size] for whole in before):
        return False
    each = tower and data_lib.static_size(tower.data)
    return tower is None or bool(each and size % each == 0)


def _is_of_pairs(value: Value, values: Growing) -> bool:
    """Whether a value has an entry for each pair of examples."""
    if any(degree_of(size) != 0 for size in (value.shape or ())[1:]):
        return True
    cause = _cause(value)
    if cause is None or None not in (value.shape or ())[1:]:
        return False
    return sum(values.value_of(t).rows is not None for t in cause.inputs) > 1


def _cause(value: Value) -> Any:
    """Return the operation that makes a value unknown, or None."""
    return None if value.reason is None else value.reason.operation


def _joins(value: Value) -> bool:
    """Whether a value is unknown because it joins others."""
    cause = _cause(value)
    return cause is not None and cause.type == "ConcatV2"


def _selects_own(
    value: Value, values: Growing, before: list[tf.Tensor]
) -> bool:
    """Whether a value is unknown only because own rows are selected."""
    cause = _cause(value)
    if cause is None:
        return False
    if not _follows(cause.outputs[0], before):
        return True
    found = [values.value_of(t) for t in cause.inputs if t.shape.rank]
    others = [v for v in found if v.rows is None or v.rows.axis]
    return len(others) < len(found) and all(
        v.shape is not None and isinstance(v.shape[0], int) for v in others
    )


def _follows(value: tf.Tensor, before: list[tf.Tensor]) -> bool:
    """Whether a tensor is computed from any of those that were gathered."""
    # Nobody sees into nested functions.
    if tf.executing_eagerly() or value.graph is not compat.get_default_graph():
        return False
    leaves = tf.nest.flatten(before, expand_composites=True)
    gathered = {leaf.op for leaf in leaves if hasattr(leaf, "graph")}
    waiting = [value.op]
    seen: set[Any] = set()
    while waiting:
        operation = waiting.pop()
        if operation in gathered:
            return True
        if operation not in seen:
            seen.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
    return False


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
    """Tell by the number of rows, for eager values and static shapes."""
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
            "before. With run_eagerly=True, or a batch of a fixed size, it is "
            "not known whether these are the rows of the global batch, which "
            "need not be gathered: use them as they are. If they are several "
            "for each of the tower's own examples, gather all values in one "
            "call, or compile without run_eagerly, where this is known."
        )
    if hasattr(value, "graph"):
        return (1,)
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
