"""What the rules of all families are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from keras_towers.partition.sizes import (
    UNKNOWN,
    Size,
    broadcast,
    grows,
    times_in,
    units_in,
)
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.values import (
    Degree,
    DoesNotSplit,
    Kind,
    NotFollowed,
    Rows,
    Shape,
    Value,
    common,
    examples,
    same,
    total,
)

Rule: TypeAlias = "Callable[..., Value | Sequence[Value]]"
RuleT = TypeVar("RuleT", bound=Rule)
RULES: dict[str, Rule] = {}
# Inputs that are sizes, or numbers that an operation hands on as they are.
SIZES: dict[str, Sequence[int]] = {}

_OTHER_UNITS = (
    "combines entries of examples of which there may be different numbers"
)
_EXAMPLES_AND_SUMS = "gives every example a sum or mean over the batch"


def rule(*types: str, sizes: Sequence[int] = ()) -> Callable[[RuleT], RuleT]:
    """Register what a function says of some types of operations.

    It takes the operation and the values of its inputs, and returns the value
    of each output, or one for all of them. It raises DoesNotSplit.

    Args:
        types: the types.
        sizes: the inputs of which all that matters is what is known of them.
    """

    def add(function: RuleT) -> RuleT:
        RULES.update(dict.fromkeys(types, function))
        SIZES.update(dict.fromkeys(types, sizes))
        return function

    return add


def refuse_sums(node: Node, values: Iterable[Value]) -> None:
    """Refuse sums over the batch as inputs of what is not linear."""
    values = list(values)
    if any(value.kind is Kind.SUM for value in values):
        mixed = any(value.kind is Kind.ROWS for value in values)
        raise DoesNotSplit(
            f"takes {node.type} of a sum or mean over the batch"
            + (", together with examples" if mixed else "")
        )


def free(node: Node, *values: Value) -> Degree:
    """Check that values do not scale with the number of examples."""
    for value in values:
        if not value.is_free:
            raise DoesNotSplit(
                f"takes {node.type} of what scales with the number of examples"
            )
    return 0


def nonlinear(node: Node, *values: Value) -> Degree:
    """Check that values are neither sums over the batch nor scale with it."""
    refuse_sums(node, values)
    return free(node, *values)


def refuse_others(values: Iterable[Value], text: str) -> None:
    """Check that all towers have values that one device has."""
    if not all(value.is_same for value in values):
        raise DoesNotSplit(text)


def fixed(value: Value, what: str = "an axis") -> Any:
    """Return entries that are known, without sizes: a list, or a number."""
    known = value.known
    if known is None or any(
        isinstance(e, Size) or e is UNKNOWN for e in known.flat
    ):
        raise NotFollowed(
            f"takes {what} that is not known before the step runs"
        )
    return known.tolist()


def axes_of(node: Node, value: Value, rank: int) -> list[int]:
    """Return axes, which are 0 or more."""
    axes = np.ravel(np.asarray(fixed(value), dtype=object))
    return sorted({int(axis) % rank for axis in axes}) if rank else []


def rank_of(node: Node, index: int, value: Value) -> int:
    """Return the rank of an input."""
    rank = len(value.shape) if value.shape is not None else node.rank(index)
    if rank is None:
        raise NotFollowed(f"takes {node.type} of a tensor of unknown rank")
    return rank


def shape_of(node: Node, index: int, value: Value) -> Shape:
    """Return the shape of an input."""
    if value.shape is not None:
        return value.shape
    return (None,) * rank_of(node, index, value)


def without(shape: Shape | None, *axes: int) -> Shape | None:
    """Return a shape without some axes."""
    if shape is None:
        return None
    return tuple(d for axis, d in enumerate(shape) if axis not in axes)


def replaced(shape: Shape | None, axis: int, size: Any) -> Shape | None:
    """Return a shape with another size of an axis."""
    if shape is None:
        return None
    return (*shape[:axis], size, *shape[axis + 1 :])


def rows_of(value: Value) -> Rows:
    """Return where the examples are in what is known to have them."""
    assert value.rows is not None
    return value.rows


def multiple(size: Any, rows: Rows) -> int:
    """Return how many rows each unit has in an axis of this size."""
    count = times_in(size, rows.of_each)
    if not count and rows.unit is not None:
        raise NotFollowed(
            "reshapes entries of which examples may have different numbers"
        )
    if not count:
        raise DoesNotSplit(f"makes {size} rows of n examples")
    return count


def shapes_together(values: Iterable[Value]) -> Shape | None:
    """Return the shape of an elementwise operation, if it is known."""
    shapes = [value.shape for value in values]
    if any(shape is None for shape in shapes):
        return None
    return tuple(functools.reduce(broadcast, shapes))  # type: ignore[arg-type]


def aligned(
    node: Node,
    values: Sequence[Value],
    degree: Degree,
    ranks: Sequence[int] | None = None,
) -> Value:
    """Return the value of an elementwise operation on SAME and ROWS.

    Args:
        node: the operation.
        values: its N inputs, which are broadcast.
        degree: the degree of the output.
        ranks: the N ranks; None: those of the inputs of the operation.
    """
    if ranks is None:
        ranks = [rank_of(node, k, value) for k, value in enumerate(values)]
    rank = max(ranks, default=0)
    shape = shapes_together(values)
    every = []
    for value, own in zip(values, ranks, strict=True):
        if value.rows is not None:
            ahead = 0 if value.axis is None else rank - own
            every.append(value.rows.at(value.rows.axis + ahead))
    if not every:
        return same(degree, shape=shape)
    return examples(one_order(node, every), degree, shape=shape)


def one_order(node: Node, every: Sequence[Rows]) -> Rows:
    """Return the rows of what combines several, row by row."""
    if len({rows.axis for rows in every}) > 1:
        raise DoesNotSplit("combines every example with every other")
    if len({rows.unit for rows in every}) > 1:
        raise NotFollowed(_OTHER_UNITS)
    if len({rows.count for rows in every}) > 1:
        raise DoesNotSplit("combines different numbers of rows of an example")
    drawn = [rows for rows in every if rows.draw is not None]
    known = [rows for rows in every if not rows.uniform and rows.draw is None]
    if len({(rows.outer, rows.inner) for rows in known}) > 1:
        raise DoesNotSplit("combines the rows of examples in different orders")
    first = (known or drawn or every)[0]
    if len({rows.draw for rows in drawn}) > 1 or (known and drawn):
        first = node.layouts.resolved(first)
        for rows in drawn:
            node.layouts.use(rows, first.outer, first.inner)
    return first


def added(
    node: Node,
    values: Sequence[Value],
    verb: str = "adds",
    ranks: Sequence[int] | None = None,
) -> Value:
    """Return the value of what is linear in all values together: a sum."""
    if not any(value.kind is Kind.SUM for value in values):
        return aligned(
            node, values, common((v.degree for v in values), verb), ranks
        )
    if any(v.kind is Kind.ROWS and v.degree is not None for v in values):
        raise DoesNotSplit(_EXAMPLES_AND_SUMS)
    degree = common((v.degree_as_sum for v in values), verb)
    return total(degree, shape=shapes_together(values))


def has_sum(values: Sequence[Value]) -> bool:
    """Return whether a factor of a product is a sum over the batch.

    No other may be one, or belong to examples.
    """
    sums = [value for value in values if value.kind is Kind.SUM]
    if len(sums) > 1:
        raise DoesNotSplit(
            "multiplies sums or means over the batch with each other"
        )
    if sums and any(v.rows and v.degree is not None for v in values):
        raise DoesNotSplit(
            "multiplies every example by a sum or mean over the batch"
        )
    return bool(sums)


def spread(node: Node, value: Value, shape: Shape | None) -> Value:
    """Return SAME that is repeated along new axes, maybe for every example."""
    if shape is None:
        raise NotFollowed("makes a tensor whose shape follows from the data")
    grown = [
        axis
        for axis, size in enumerate(shape)
        if grows(size) or size is UNKNOWN
    ]
    if not grown:
        return value.with_(shape=shape)
    if value.kind is Kind.SUM and value.degree is not None:
        raise DoesNotSplit(_EXAMPLES_AND_SUMS)
    if value.kind is Kind.ROWS:
        raise DoesNotSplit("repeats every example for every other")
    if len(grown) > 1:
        raise DoesNotSplit("makes a matrix of all pairs of examples")
    found = units_in(shape[grown[0]])
    if found is None or not found[1]:
        raise DoesNotSplit(f"makes {shape[grown[0]]} rows of n examples")
    rows = Rows(grown[0], 1, found[1], uniform=True, unit=found[0])
    return examples(rows, value.degree, shape=shape)


def dropped(value: Value, axes: Sequence[int]) -> Value:
    """Return what is left without axes, none of which are of examples."""
    shape = without(value.shape, *axes)
    if value.axis is None:
        return value.with_(shape=shape)
    ahead = sum(axis < value.axis for axis in axes)
    return value.moved(value.axis - ahead, shape=shape)


def inserted(value: Value, axis: int, size: Any = 1) -> Value:
    """Return a value with a new axis."""
    shape = value.shape
    if shape is not None:
        shape = (*shape[:axis], size, *shape[axis:])
    if value.axis is None:
        return value.with_(shape=shape)
    return value.moved(value.axis + (axis <= value.axis), shape=shape)
