"""Layouts: how towers hold a value of the one-device step.

* Replicated: every tower has the value of one device.
* Sharded: every tower has its own rows along an axis, such as its examples.
  Concatenated in the order of the towers, they are the value of one device.
* Partial: every tower has one term of a sum. The sum is the value of one
  device.

GSPMD (arXiv 2105.04663) calls these replicated, tiled and partial; PyTorch's
DTensor calls them Replicate, Shard and Partial. Here, unlike there, shards may
differ in size, and may be empty.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, TypeAlias, TypeGuard

import tensorflow as tf

from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.sizes import (
    UNKNOWN,
    Dimension,
    Size,
    multiple_of,
)

Shape: TypeAlias = "tuple[Dimension, ...]"


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """The thing that is divided over towers: an example of the batch.

    For a variable in shards, it is an entry of one of its axes.

    Attributes:
        size: the global number of units: a symbol, or an int if the trace knows
            it.
        count: the number of units of each tower.
        start: for each tower, the number of units of all earlier towers.
        total: the global number of units.
        of_variables: whether it is the axis of a variable.
        local_size: the number of units of every tower; None: towers differ.
    """

    size: Dimension
    count: Tensor
    start: Tensor
    total: Tensor
    of_variables: bool = False
    local_size: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class DataDependentUnit:
    """A unit whose number depends on the data, such as a row that a mask keeps.

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
        """The number of units on all earlier towers, for each tower."""
        return self.builder.exchange("before", self.count)

    @functools.cached_property
    def total(self) -> Tensor:
        """The global number of units."""
        return self.builder.exchange("sum", self.count)


@dataclasses.dataclass(frozen=True)
class Replicated:
    """The layout of a value that every tower has whole."""


@dataclasses.dataclass(frozen=True)
class AllExamples(Replicated):
    """The layout of an input with a row for every example, on every tower."""


@dataclasses.dataclass(frozen=True)
class Fixed(Replicated):
    """The layout of an input that never changes, equal in all processes.

    An example is a table of words.
    """


@dataclasses.dataclass(frozen=True)
class Partial:
    """The layout of a value of which every tower has one term of a sum."""


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The layout of a value of which every tower has its rows along an axis.

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
    def of_variables(self) -> bool:
        """Whether the rows are counted like those of a variable in shards."""
        return isinstance(self.unit, Unit) and self.unit.of_variables

    @property
    def rows_per_unit(self) -> int:
        """The number of rows of a unit in all blocks."""
        return self.blocks * self.rows

    @property
    def size(self) -> Dimension:
        """The global size of the axis."""
        return self.rows_per_unit * self.unit.size

    def rows_per_unit_in(self, size: Dimension) -> int | None:
        """Return the rows per unit in an axis; None: the size does not fit."""
        if isinstance(self.unit.size, Size):
            return multiple_of(size, self.unit.size)
        whole = isinstance(size, int) and not size % self.unit.size
        return size // self.unit.size if whole else None


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list of tensors or lists that share a layout.

    Every tower has its rows, or its partial sum, of each element. If each
    element is a row, such as an example, the list of a tower contains its own
    rows. An optional value is a list with one element or none.
    """

    element: Sharded | Partial | ListOf


@dataclasses.dataclass(frozen=True)
class Mirrored:
    """The layout of an input with a copy on every tower, such as a handle."""


@dataclasses.dataclass(frozen=True)
class InShards:
    """The layout of an input that is the handle of a variable in shards.

    Attributes:
        axis: the axis that is divided.
        size: its global size.
        rows: the number of rows of every tower; None: towers differ.
    """

    axis: int
    size: int
    rows: int | None = None


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """The layout of a variable or a gradient on a mesh, whose rows are towers.

    Attributes:
        towers: ``InShards``: each tower has its rows; ``Mirrored``: each has
            all that its columns divide; ``Replicated``: that is there once.
        columns: how the columns of a tower divide it; None: they do not.
    """

    towers: InShards | Mirrored | Replicated = Replicated()
    columns: InShards | None = None

    @property
    def rows(self) -> InShards | None:
        """The layout over towers; None: towers do not divide it."""
        return self.towers if isinstance(self.towers, InShards) else None

    @property
    def divides(self) -> bool:
        """Whether it is divided over towers or columns."""
        return self.rows is not None or self.columns is not None


@dataclasses.dataclass(frozen=True)
class SparseIndices:
    """The layout of indices of a sparse tensor, from a tower's first row.

    Attributes:
        unit: the name of the unit of its entries.
    """

    unit: str


@dataclasses.dataclass(frozen=True)
class SparseShape:
    """The layout of a sparse tensor's dense shape, local to each tower.

    Attributes:
        sizes: the sizes after the first, None where they are unknown.
    """

    sizes: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class RowSplits:
    """The layout of a ragged tensor's row splits, local to each tower.

    Attributes:
        unit: the name of the unit of its entries.
    """

    unit: str


Layout: TypeAlias = Replicated | Sharded | Partial | ListOf
InputLayout: TypeAlias = (
    Layout | Mirrored | InShards | SparseIndices | SparseShape | RowSplits
)

REPLICATED = Replicated()
FIXED = Fixed()
PARTIAL = Partial()
MIRRORED = Mirrored()


def is_row_per_element(element: object) -> TypeGuard[Sharded]:
    """Whether each element of a list is a row."""
    return isinstance(element, Sharded) and element.axis < 0


def stacked_layout(element: Any) -> Any:
    """Return the layout of the stack of a list's elements."""
    if isinstance(element, Sharded):
        return element.at_axis(element.axis + 1)
    return element


def may_hold_rows(size: Dimension, layout: Sharded) -> bool:
    """Whether a declared size may be a number of rows."""
    return size is not UNKNOWN and size in (-1, layout.size)


def sizes_of(shape: Iterable[Dimension | None]) -> Shape:
    """Return the sizes of a traced shape, with ``UNKNOWN`` for None."""
    return tuple(UNKNOWN if size is None else size for size in shape)


def local_shape(shape: tf.TensorShape, layout: object) -> tf.TensorShape:
    """Return the shape that a traced tensor has on a tower."""
    if shape.rank is None or not isinstance(layout, (Sharded, InShards)):
        return shape
    sizes = list(shape)
    if isinstance(layout, InShards):
        sizes[layout.axis] = layout.rows
    else:
        unit = layout.unit
        size = unit.local_size if isinstance(unit, Unit) else None
        rows = None if size is None else layout.rows_per_unit * size
        sizes[layout.axis] = rows
    return tf.TensorShape(sizes)
