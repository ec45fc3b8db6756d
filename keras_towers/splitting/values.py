"""What a tensor of a tower's step is to the tensor of one device.

Tower k has n_k of the N examples of the global batch. A value of degree d is
one for which ``global = tower's * (N / n_k) ** d``:

* SAME: the same on all towers; of degree 1, such as a tower's number of
  examples, it has to be scaled.
* ROWS: entries along one axis belong to examples. The towers' rows, one after
  the other, are those of the global batch.
* SUM: a sum over examples: the towers' values have to be added up. What is
  SAME of degree d is a SUM of degree d - 1, too, as the n_k add up to N. A
  mean over examples is a SUM of degree -1.
* OTHER: nothing that is known, with the reason.

What is zero has every degree, which is written as None. Compare the sharding
specifications of GSPMD (arXiv 2105.04663) and the placements of DTensor:
replicated, sharded and partial; here a mean is told from a sum, since towers
have different numbers of examples.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from keras_towers.partition.sizes import (
    EXAMPLES,
    UNKNOWN,
    Size,
    degree_of,
    is_summed,
)

Degree: TypeAlias = "int | Fraction | None"
Shape: TypeAlias = "tuple[Any, ...]"


class DoesNotSplit(Exception):
    """What a step does that does not split: "multiplies two sums"."""

    is_open = False


class NotFollowed(DoesNotSplit):
    """What a step does that may split, as nobody knows."""

    is_open = True


class Kind(enum.Enum):
    """The kinds of values; see above."""

    SAME = "same"
    ROWS = "rows"
    SUM = "sum"
    OTHER = "other"
    # A variable, or another resource; ``key`` tells which.
    HANDLE = "handle"
    # The number of the round of a loop over the examples, which is an index of
    # its example in lists, and nothing else.
    ROUND = "round"
    # An optional of several tensors, which are its ``items``.
    OPTIONAL = "optional"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where the examples are in a tensor.

    An index along the axis is (block, example, row): ``outer`` blocks, each of
    all examples, of which each has ``inner`` rows.

    Attributes:
        axis: the axis; -1: no axis of the tensor but the place in a list, or
            the round of a loop.
        uniform: whether all entries along the axis are alike. Then there is one
            block, but any other division would be as true.
        draw: tells the random numbers which the tensor consists of. Their order
            is not known before they are used: see ``Layouts``.
        unit: None, or of what there are as many in the place of an example as
            follow from it, such as values of ragged rows: all of them together.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    uniform: bool = False
    draw: Any = None
    unit: Size | None = None

    @property
    def count(self) -> int:
        """The number of rows of each example, or unit."""
        return self.outer * self.inner

    @property
    def of_each(self) -> Size:
        """The number of examples, or units."""
        return EXAMPLES if self.unit is None else self.unit

    def at(self, axis: int) -> Rows:
        """Return the same rows along another axis."""
        return dataclasses.replace(self, axis=axis)

    def in_order(self, outer: int, inner: int) -> Rows:
        """Return as many rows in an order that is known."""
        return Rows(self.axis, outer, inner, unit=self.unit)

    @property
    def place(self) -> tuple[int, int, int]:
        """Axis, blocks and rows."""
        return self.axis, self.outer, self.inner


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a value is OTHER: what happens, and the operation that does it.

    Attributes:
        text: what the step does: "multiplies two sums".
        operation: the operation that does it.
        is_open: whether it may split nevertheless, as nobody knows.
        of_numbers: whether it only follows from the number of examples.
    """

    text: str
    operation: Any = dataclasses.field(default=None, compare=False)
    is_open: bool = False
    of_numbers: bool = False


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of a tensor.

    Attributes:
        kind: what it is to the tensor of one device.
        degree: how it scales with the number of examples; None: it is zero.
        rows: of ROWS: where the examples are.
        reason: of OTHER: why.
        shape: its dimensions; None for one that is not known.
        known: its entries, as far as they are known: an array of objects.
        key: of HANDLE: what it is a handle of.
        items: of OPTIONAL: what it holds.
        meaning: of whole numbers: what they say of where entries are.
    """

    kind: Kind
    degree: Degree = 0
    rows: Rows | None = None
    reason: Reason | None = None
    shape: Shape | None = dataclasses.field(default=None, compare=False)
    known: Any = dataclasses.field(default=None, compare=False)
    key: Any = None
    items: tuple[Any, ...] = ()
    meaning: Any = None

    def with_(self, **changes: Any) -> Value:
        """Return the value of a tensor of other entries and another shape."""
        changes = {"known": None, "shape": None, "meaning": None, **changes}
        return dataclasses.replace(self, **changes)

    def moved(self, axis: int, **changes: Any) -> Value:
        """Return the same rows along another axis."""
        assert self.rows is not None
        return self.with_(rows=self.rows.at(axis), **changes)

    @property
    def axis(self) -> int | None:
        """The axis of the tensor that has the examples, if one has."""
        at = -1 if self.rows is None else self.rows.axis
        return None if at < 0 else at

    @property
    def is_free(self) -> bool:
        """Whether it does not scale with the number of examples."""
        return self.degree in (0, None)

    @property
    def is_same(self) -> bool:
        """Whether all towers have the value that one device has."""
        return self.kind is Kind.SAME and self.is_free

    @property
    def degree_as_sum(self) -> Degree:
        """The degree, if it is taken for a sum over examples."""
        if self.kind is Kind.SAME and self.degree is not None:
            return self.degree - 1
        return self.degree

    @property
    def grows(self) -> bool:
        """Whether its shape or entries depend on the number of examples."""
        sizes = [] if self.known is None else list(self.known.flat)
        return any(
            degree_of(s) != 0
            for s in (*(self.shape or ()), *sizes)
            if s is not None
        )

    def __repr__(self) -> str:
        place = f" {self.rows.place}" if self.rows else ""
        why = f": {self.reason.text}" if self.reason else ""
        return f"{self.kind.value}({self.degree}){place}{why}"


def same(degree: Degree = 0, **details: Any) -> Value:
    """Return a value that all towers have."""
    return Value(Kind.SAME, degree, **details)


def total(degree: Degree = 0, **details: Any) -> Value:
    """Return a sum over examples."""
    return Value(Kind.SUM, degree, **details)


def examples(rows: Rows = Rows(0), degree: Degree = 0, **details: Any) -> Value:
    """Return a value with rows for each example."""
    return Value(Kind.ROWS, degree, rows, **details)


def other(
    text: str,
    operation: Any = None,
    is_open: bool = False,
    of_numbers: bool = False,
    **details: Any,
) -> Value:
    """Return a value of which nothing is known."""
    reason = Reason(text, operation, is_open, of_numbers)
    return Value(Kind.OTHER, reason=reason, **details)


def handle(key: Any) -> Value:
    """Return a handle of a variable or another resource."""
    return Value(Kind.HANDLE, key=key)


def of_known(entries: Any, is_same: bool = False) -> Value:
    """Return the value of a tensor whose entries are known: sizes, numbers.

    Args:
        entries: them.
        is_same: whether all towers have those that are not known, too.
    """
    known = np.asarray(entries, dtype=object)
    details: dict[str, Any] = {"known": known, "shape": known.shape}
    if is_same and UNKNOWN in known.flat:
        return same(**details)
    if known.size == 1 and is_summed(known.flat[0]):
        return total(**details)
    degrees = {degree_of(entry) for entry in known.flat if not _is_zero(entry)}
    if not degrees:
        return same(None, **details)
    if len(degrees) > 1 or None in degrees:
        return other("uses sizes that scale differently", **details)
    return same(degrees.pop(), **details)


def _is_zero(entry: Any) -> bool:
    return (
        not isinstance(entry, (Size, str, bytes))
        and entry is not UNKNOWN
        and not entry
    )


def product(*degrees: Degree) -> Degree:
    """Return the degree of a product."""
    known = [d for d in degrees if d is not None]
    return sum(known) if len(known) == len(degrees) else None


def power(degree: Degree, exponent: Any) -> Degree:
    """Return the degree of a power."""
    if degree is None:
        # The power of zero that is no positive one is not zero.
        return None if exponent > 0 else 0
    if not degree:
        return degree
    fraction = Fraction(exponent).limit_denominator(64)
    if abs(fraction - Fraction(exponent)) > 1e-9:
        raise DoesNotSplit(
            "takes a power of what scales with the number of examples"
        )
    return degree * fraction


def common(degrees: Iterable[Degree], verb: str = "adds") -> Degree:
    """Return the degree that all have."""
    known = {d for d in degrees if d is not None}
    if len(known) > 1:
        raise DoesNotSplit(
            f"{verb} values that scale differently with the number of "
            "examples, such as a sum and a mean"
        )
    return known.pop() if known else None
