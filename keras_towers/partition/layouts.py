"""How a value of the one-device step is laid out over towers.

* Replicated: every tower has the value of one device.
* Sharded: every tower has its own rows along an axis, such as its examples.
  Concatenated in the order of the towers, they are the value of one device.
* Partial: every tower has one term of a sum. The sum is the value of one
  device.

GSPMD (arXiv 2105.04663) calls these replicated, tiled and partial; PyTorch's
DTensor calls them Replicate, Shard and Partial. Unlike there, shards may differ
in size or be empty.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import tensorflow as tf

from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import UNKNOWN, Size, multiple_of

if TYPE_CHECKING:
    from keras_towers.partition.builder import Builder

Shape: TypeAlias = "tuple[Any, ...]"
Values: TypeAlias = "Sequence[Value]"


class NotDivided(Exception):
    """This way of dividing an operation does not apply; another one may."""


def require(condition: object) -> None:
    """Raise ``NotDivided`` unless a condition holds."""
    if not condition:
        raise NotDivided


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """The thing that is divided over towers: the examples of a batch.

    Attributes:
        size: the global number of units: a symbol, or an int if the trace knows
            it.
        count: the number of units of each tower.
        start: for each tower, the number of units of all earlier towers.
        total: the global number of units.
    """

    size: Any
    count: Tensor
    start: Tensor
    total: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class DataDependentUnit:
    """A unit whose number depends on the data, such as the rows a mask keeps.

    Its ``start`` and ``total`` need an exchange, which is added on first use.

    Attributes:
        size: the symbol of the global number of units.
        count: the number of units of each tower.
        builder: adds the exchanges.
    """

    size: Size
    count: Tensor
    builder: Builder

    @functools.cached_property
    def start(self) -> Tensor:
        """For each tower, the number of units of all earlier towers."""
        return self.builder.exchange("before", self.count)

    @functools.cached_property
    def total(self) -> Tensor:
        """The global number of units."""
        return self.builder.exchange("sum", self.count)


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Every tower has the value of one device."""


@dataclasses.dataclass(frozen=True)
class Partial:
    """Every tower has one term of a sum."""


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Every tower has its own rows along an axis.

    An index along the axis is a triple (block, unit, row): a block contains all
    units, and each unit has some rows in it.

    Attributes:
        axis: the axis; -1 for the elements of a list, if each element is a row.
        unit: the unit that is divided. For an input of the graph, None stands
            for examples, and a string names another unit.
        blocks: the number of blocks.
        rows: the number of rows of a unit in each block.
    """

    axis: int
    unit: Any = None
    blocks: int = 1
    rows: int = 1

    def at_axis(self, axis: int) -> Sharded:
        """Return the same layout at another axis."""
        return dataclasses.replace(self, axis=axis)

    @property
    def rows_per_unit(self) -> int:
        """The number of rows of a unit in all blocks."""
        return self.blocks * self.rows

    @property
    def size(self) -> Any:
        """The global size of the axis."""
        return self.rows_per_unit * self.unit.size

    def rows_per_unit_in(self, size: Any) -> int | None:
        """Return the rows per unit in an axis; None: the size does not fit."""
        if isinstance(self.unit.size, Size):
            return multiple_of(size, self.unit.size)
        whole = isinstance(size, int) and not size % self.unit.size
        return size // self.unit.size if whole else None

    def blocks_in(self, size: Any) -> int | None:
        """Return the blocks in an axis; None: the size does not fit."""
        count = self.rows_per_unit_in(size)
        return (
            None if count is None or count % self.rows else count // self.rows
        )


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list of tensors or lists that share a layout."""

    element: Sharded | Partial | ListOf


@dataclasses.dataclass(frozen=True)
class SparseIndices:
    """An input: indices of a sparse tensor, counted from a tower's first row.

    Attributes:
        unit: the name of the unit of its entries.
    """

    unit: str


@dataclasses.dataclass(frozen=True)
class SparseShape:
    """An input: the dense shape of a sparse tensor, local to each tower.

    Attributes:
        sizes: the sizes after the first, None where they are unknown.
    """

    sizes: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class RowSplits:
    """An input: the row splits of a ragged tensor, local to each tower.

    Attributes:
        unit: the name of the unit of its entries.
    """

    unit: str


Layout: TypeAlias = Replicated | Sharded | Partial | ListOf
InputLayout: TypeAlias = Layout | SparseIndices | SparseShape | RowSplits

REPLICATED = Replicated()
PARTIAL = Partial()


@dataclasses.dataclass(frozen=True, eq=False)
class RowNumbers:
    """Integers that are row numbers, and on every tower refer to its own rows.

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
    """

    local: Tensor
    layout: Sharded
    unit: Unit | DataDependentUnit
    rows: int = 1
    grain: int = 1
    is_first_column: bool = False

    @property
    def row_layout(self) -> Sharded:
        """The layout of the numbered rows along axis 0."""
        return Sharded(0, self.unit, 1, self.rows)


@dataclasses.dataclass(frozen=True)
class BelowLimit:
    """Integers that are at least 0 and less than a limit."""

    limit: int


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedSplits:
    """The row splits of a ragged tensor, or a part of them.

    Attributes:
        local: the local splits, counted from the first entry of the tower.
        unit: the unit of the entries.
        kind: ``row_splits``, ``row_starts`` or ``row_limits``.
    """

    local: Tensor
    unit: DataDependentUnit
    kind: str = "row_splits"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WholeFrom:
    """How to compute a whole value from the whole values of its inputs.

    Attributes:
        operation: the operation that computes it.
        index: the index of the output.
        inputs: the inputs of the operation.
        gathers: whether the inputs are rows to gather, not partial sums to add.
    """

    operation: Any
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
        elements: for a list, the facts that hold for all its elements.
        meaning: for integers, the rows that they refer to, or their limit.
    """

    layout: Layout
    local: Tensor | None = None
    whole: Tensor | None = None
    shape: Shape | None = None
    known: Any = None
    whole_from: WholeFrom | None = None
    elements: Any = None
    meaning: RowNumbers | BelowLimit | RaggedSplits | None = None

    @property
    def rank(self) -> int:
        """The number of axes; 0 if it is unknown."""
        return len(self.shape or ())

    @property
    def sizes(self) -> Shape:
        """Its shape.

        Raises:
            NotDivided: its rank is unknown.
        """
        require(self.shape is not None)
        return self.shape or ()

    def as_rows(self) -> tuple[Sharded, Tensor]:
        """Return its layout and its local rows.

        Raises:
            NotDivided: it is not sharded.
        """
        require(self.sharded)
        return cast("Sharded", self.layout), cast("Tensor", self.local)

    @property
    def number(self) -> Any:
        """Its only entry, or ``UNKNOWN``."""
        if self.known is None or np.size(self.known) != 1:
            return UNKNOWN
        return np.ravel(self.known)[0]

    @property
    def row_numbers(self) -> RowNumbers | None:
        """The row numbers that it has, or None."""
        return self.meaning if isinstance(self.meaning, RowNumbers) else None

    @property
    def sharded(self) -> Sharded | None:
        """Its layout if it is sharded, or None."""
        return self.layout if isinstance(self.layout, Sharded) else None

    @property
    def is_replicated(self) -> bool:
        """Whether its whole is available on every tower."""
        if isinstance(self.layout, Replicated):
            return True
        return isinstance(self.layout, Partial) and self.whole is not None

    @property
    def gathers(self) -> bool:
        """Whether its whole is computed from gathered rows."""
        return self.whole_from is not None and self.whole_from.gathers

    @property
    def is_partial(self) -> bool:
        """Whether it is a partial sum that has not been added up."""
        return isinstance(self.layout, Partial) and self.whole is None


def sizes_of(shape: Iterable[Any]) -> Shape:
    """Return the sizes of a traced shape, with ``UNKNOWN`` for None."""
    return tuple(UNKNOWN if size is None else size for size in shape)


def static(shape: Any) -> tf.TensorShape:
    """Return a shape as TensorFlow knows it: None for symbols."""
    if isinstance(shape, tf.TensorShape):
        return shape
    return tf.TensorShape([s if isinstance(s, int) else None for s in shape])


def local_shape(shape: tf.TensorShape, layout: Any) -> tf.TensorShape:
    """Return the shape that a traced tensor has on a tower."""
    if shape.rank is None or not isinstance(layout, Sharded):
        return shape
    sizes = list(shape)
    sizes[layout.axis] = None
    return tf.TensorShape(sizes)
