"""Values of the one-device step: their layouts, and what is known of them.

Facts, such as that integers are row numbers, let rules divide what takes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_towers.partition.ir.layouts import (
    REPLICATED,
    DataDependentUnit,
    Layout,
    Partial,
    Replicated,
    Shape,
    Sharded,
    Unit,
)
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import (
    NUMBERS,
    SHAPE,
    asserted,
    require,
    unless_none,
)
from keras_towers.partition.ir.sizes import UNKNOWN, Dimension, Size

Values: TypeAlias = "Sequence[Value]"


@dataclasses.dataclass(frozen=True, eq=False)
class RowNumbers:
    """A fact: integers are row numbers, and a tower's refer to its own rows.

    A global row number is the local one plus the number of rows of all earlier
    towers.

    Attributes:
        local: the local row numbers: at least 0 and less than the number of
            rows of the tower.
        layout: the layout of these numbers.
        unit: the unit of the rows that they refer to.
        rows: the number of rows of a unit.
        grain: a common divisor of the row numbers.
        is_first_column: whether only column 0 of the last axis has row numbers;
            the other columns are the same as on one device.
        are_all: whether every row of the tower is among them, unless they are
            none at all.
    """

    local: Tensor
    layout: Sharded
    unit: Unit | DataDependentUnit
    rows: int = 1
    grain: int = 1
    is_first_column: bool = False
    are_all: bool = False

    @property
    def row_layout(self) -> Sharded:
        """The layout of the numbered rows along axis 0."""
        return Sharded(0, self.unit, 1, self.rows)


@dataclasses.dataclass(frozen=True)
class BelowLimit:
    """A fact: integers are at least 0 and less than a limit."""

    limit: int


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedSplits:
    """A fact: a value is row splits of a ragged tensor, or places in its rows.

    Attributes:
        local: the local splits, counted from the first entry of the tower.
        entries: the layout of the entries along axis 0.
        rows: the layout of the rows.
        kind: ``row_splits``, ``row_starts`` or ``row_limits``; "": other places
            that are counted like them.
        is_after: whether no place is before its row.
        is_before: whether no place is after the end of its row.
    """

    local: Tensor
    entries: Sharded
    rows: Sharded
    kind: str = "row_splits"
    is_after: bool = True
    is_before: bool = True


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WholeFrom:
    """A recipe for a whole value, from the whole values of its inputs.

    Attributes:
        operation: the operation that computes it.
        index: the index of the output.
        inputs: the inputs of the operation.
        gathers: whether the inputs are rows to gather, not partial sums to add.
    """

    operation: tf.Operation
    index: int
    inputs: Sequence[Value]
    gathers: bool


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A tensor of the one-device step, and its local values on the towers.

    Attributes:
        layout: its layout.
        local: the tensor on each tower: its rows, or its partial sum. For a
            replicated value, the whole, if every tower computes it.
        whole: the tensor on one device; None: not computed yet.
        shape: its global shape, of ints, ``Size`` and ``UNKNOWN``; None: its
            rank is unknown.
        known: its entries on one device, as far as they are known before the
            step runs: an array of ints, bools, ``Size`` and ``UNKNOWN``; None:
            no entry is known.
        whole_from: for a partial sum, how to compute the whole if it is not the
            sum of the local values.
        rows_from: for a replicated value, returns each tower's rows, given
            their layout, or raises ``NotDivided``; None: they are sliced from
            the whole.
        elements: for a list, the facts that hold for all its elements.
        meaning: for integers, the rows that they refer to, or their limit.
    """

    layout: Layout
    local: Tensor | None = None
    whole: Tensor | None = None
    shape: Shape | None = None
    known: np.ndarray | None = None
    whole_from: WholeFrom | None = None
    rows_from: Callable[[Sharded], Tensor] | None = None
    elements: Elements | None = None
    meaning: RowNumbers | BelowLimit | RaggedSplits | None = None

    @property
    def rank(self) -> int:
        """The number of axes; 0 if it is unknown."""
        return len(self.shape or ())

    @property
    def sizes(self) -> Shape:
        """The shape as a tuple; it must be known.

        Raises:
            NotDivided: its rank is unknown.
        """
        return unless_none(self.shape, SHAPE)

    @property
    def own(self) -> Tensor:
        """The tensor on each tower; a replicated value may have none."""
        assert self.local is not None
        return self.local

    @property
    def known_array(self) -> np.ndarray:
        """The known entries as a NumPy array.

        Raises:
            NotDivided: none is known.
        """
        return unless_none(self.known, NUMBERS)

    def as_rows(self) -> tuple[Sharded, Tensor]:
        """Return the layout, which must be ``Sharded``, and the local rows.

        Raises:
            NotDivided: it is not sharded.
        """
        return unless_none(self.sharded), self.own

    @property
    def entries(self) -> list[Dimension]:
        """The entries of a vector; ``UNKNOWN`` where they are not known.

        Raises:
            NotDivided: it is no vector, or its length is unknown.
        """
        if self.known is not None:
            require(np.ndim(self.known) == 1)
            return list(self.known)
        require(self.rank == 1 and isinstance(self.sizes[0], int))
        length: Any = self.sizes[0]
        return [UNKNOWN] * length

    @property
    def number(self) -> Dimension:
        """The only entry of a scalar, or ``UNKNOWN``."""
        if self.known is None or np.size(self.known) != 1:
            return UNKNOWN
        return np.ravel(self.known)[0]

    @property
    def row_numbers(self) -> RowNumbers | None:
        """The fact that the entries are row numbers, or None."""
        return self.meaning if isinstance(self.meaning, RowNumbers) else None

    @property
    def sharded(self) -> Sharded | None:
        """The layout if it is ``Sharded``, or None."""
        return self.layout if isinstance(self.layout, Sharded) else None

    @property
    def shards(self) -> Sharded | None:
        """The layout if it is that of a variable in shards, or None."""
        rows = self.sharded
        return rows if rows is not None and rows.of_variables else None

    @property
    def is_replicated(self) -> bool:
        """Whether every tower has the whole value."""
        if isinstance(self.layout, Replicated):
            return True
        return isinstance(self.layout, Partial) and self.whole is not None

    @property
    def gathers(self) -> bool:
        """Whether the whole value is computed from gathered rows."""
        return self.whole_from is not None and self.whole_from.gathers

    @property
    def is_partial(self) -> bool:
        """Whether the value is a partial sum, not yet added up."""
        return isinstance(self.layout, Partial) and self.whole is None


def replicated(tensor: Tensor, like: Value) -> Value:
    """Return a replicated value, with the facts of another value.

    Towers compute it, or one device does.

    Args:
        tensor: the whole value, on each tower or once for all of them.
        like: the value with the same facts.
    """
    local, whole = (tensor, None) if "towers" in tensor.axes else (None, tensor)
    return dataclasses.replace(
        like, layout=REPLICATED, local=local, whole=whole, whole_from=None
    )


def known_ints(value: Value) -> list[int]:
    """Return the entries of a vector or number as ints.

    Raises:
        NotDivided: an entry is unknown or symbolic.
    """
    entries = list(np.ravel(value.known_array))
    is_open = any(isinstance(e, Size) or e is UNKNOWN for e in entries)
    require(not is_open, NUMBERS)
    return [int(entry) for entry in entries]


def known_axes(value: Value, rank: int) -> list[int]:
    """Return the axes that a value names, sorted and not negative.

    Raises:
        NotDivided: they are unknown, or the reduced value has no axes.
    """
    require(rank)
    return sorted({axis % rank for axis in known_ints(value)})


@dataclasses.dataclass(frozen=True)
class Elements:
    """The facts about the elements of a list, as on one device.

    Attributes:
        dtype: the dtype of the elements.
        declared: the declared shape of elements, -1 for any size; None:
            unknown.
        length: the number of elements, or ``UNKNOWN``.
        item: the facts shared by all elements that were set; None: none was.
        is_full: whether all elements were set.
        are_row_numbers: whether each element that was set is its own index.
        is_optional: whether it is an optional value, not a list.
    """

    dtype: tf.DType | None
    declared: Any = None
    length: Dimension = UNKNOWN
    item: Value | None = None
    is_full: bool = True
    are_row_numbers: bool = True
    is_optional: bool = False

    @property
    def shape(self) -> Shape | None:
        """The shape of the elements, as far as it is known."""
        return None if self.item is None else self.item.shape

    def with_item(self, item: Value, is_row_number: bool = False) -> Elements:
        """Return the facts after an element was set."""
        after = dataclasses.replace(
            self, item=item, are_row_numbers=is_row_number
        )
        return asserted(common_elements(self, after))


def common_facts(a: Value, b: Value, layout: Layout = REPLICATED) -> Value:
    """Return the facts that two values share."""
    return Value(
        layout,
        shape=_common_shape(a.shape, b.shape),
        known=_common_entries(a.known, b.known),
        elements=common_elements(a.elements, b.elements),
    )


def common_elements(a: Elements | None, b: Elements | None) -> Elements | None:
    """Return the facts that the elements of two lists share."""
    if a is None or b is None:
        return None
    if (a.dtype, a.is_optional) != (b.dtype, b.is_optional):
        return None
    # A list without elements satisfies any fact.
    items = [e.item for e in (a, b) if e.item is not None]
    return Elements(
        a.dtype,
        a.declared if a.declared == b.declared else None,
        a.length if a.length == b.length else UNKNOWN,
        common_facts(items[0], items[-1]) if items else None,
        a.is_full and b.is_full,
        a.are_row_numbers and b.are_row_numbers,
        a.is_optional,
    )


def _common_shape(a: Shape | None, b: Shape | None) -> Shape | None:
    if a is None or b is None or len(a) != len(b):
        return None
    pairs = zip(a, b, strict=True)
    return tuple(size if size == other else UNKNOWN for size, other in pairs)


def _common_entries(
    a: np.ndarray | None, b: np.ndarray | None
) -> np.ndarray | None:
    if a is None or b is None or np.shape(a) != np.shape(b):
        return None
    either = np.frompyfunc(lambda x, y: x if x == y else UNKNOWN, 2, 1)
    entries = np.empty(np.shape(a), object)
    entries[...] = either(a, b)
    return entries


def have_same_facts(a: Value, b: Value) -> bool:
    """Whether two values have the same layout, and the same facts."""
    return bool(_facts(a) == _facts(b))


def _facts(value: Value | None) -> object:
    if value is None:
        return None
    known, elements = value.known, value.elements
    entries = None if known is None else (np.shape(known), known.tolist())
    facts = value.layout, value.shape, entries
    if elements is None:
        return facts
    # In a tuple an unknown length is the same as itself.
    names = [f.name for f in dataclasses.fields(elements) if f.name != "item"]
    rest = [getattr(elements, name) for name in names]
    return (*facts, *rest, _facts(elements.item))
