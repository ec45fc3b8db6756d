"""How a value of one device's step is laid out over towers.

* Replicated: all towers have the value that one device has.
* Sharded: each tower has its own rows along an axis, such as those of its
  examples. The towers' rows together are those of one device.
* Partial: each tower has a part of a sum.

GSPMD (arXiv 2105.04663) calls them replicated, tiled and partial, PyTorch's
DTensor Replicate, Shard and Partial. Here towers may have different numbers of
rows, or none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import tensorflow as tf

from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import UNKNOWN, Size, times_in

if TYPE_CHECKING:
    from keras_towers.partition.builder import Builder

Shape: TypeAlias = "tuple[Any, ...]"
Values: TypeAlias = "Sequence[Value]"


class NotDivided(Exception):
    """Towers cannot divide an operation in this way; there may be another."""


def require(condition: object) -> None:
    """Raise ``NotDivided`` unless a condition holds."""
    if not condition:
        raise NotDivided


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """What is divided over towers: the examples of a batch.

    Attributes:
        size: the number of units on one device: a symbol, or an int if the
            trace knows it.
        count: the number of units of a tower; each tower has its own.
        start: the number of units of all towers before it.
        total: the number of units of all towers.
    """

    size: Any
    count: Tensor
    start: Tensor
    total: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class DataDependentUnit:
    """A unit whose number follows from the data, such as what a mask leaves.

    Towers exchange how many they have only where an operation needs it.

    Attributes:
        size: the symbol of the number of units on one device.
        count: the number of units of a tower; each tower has its own.
        builder: takes the exchanges.
    """

    size: Size
    count: Tensor
    builder: Builder

    @functools.cached_property
    def start(self) -> Tensor:
        """The number of units of all towers before it."""
        return self.builder.exchange("before", self.count)

    @functools.cached_property
    def total(self) -> Tensor:
        """The number of units of all towers."""
        return self.builder.exchange("sum", self.count)


@dataclasses.dataclass(frozen=True)
class Replicated:
    """All towers have the value that one device has."""


@dataclasses.dataclass(frozen=True)
class Partial:
    """Each tower has a part of a sum."""


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Each tower has its own rows along an axis.

    An index along the axis is (block, unit, row): there are some blocks, each
    of all units, of which each has some rows.

    Attributes:
        axis: the axis; of a list's elements -1: their place in the list.
        unit: what is divided; of an input, where it is not yet known how many
            a tower has, None: examples, or the name of what else it is.
        blocks: the number of blocks.
        rows: the number of rows of each unit in a block.
    """

    axis: int
    unit: Any = None
    blocks: int = 1
    rows: int = 1

    def along(self, axis: int) -> Sharded:
        """Return the same along another axis."""
        return dataclasses.replace(self, axis=axis)

    @property
    def count(self) -> int:
        """How many rows there are of each unit."""
        return self.blocks * self.rows

    @property
    def size(self) -> Any:
        """The size of the axis on one device."""
        return self.count * self.unit.size

    def units_in(self, size: Any) -> int | None:
        """Return how many rows of each unit an axis has, if it has such."""
        if isinstance(self.unit.size, Size):
            return times_in(size, self.unit.size)
        whole = isinstance(size, int) and not size % self.unit.size
        return size // self.unit.size if whole else None

    def blocks_in(self, size: Any) -> int | None:
        """Return how many blocks of such rows an axis has, if it has such."""
        count = self.units_in(size)
        return (
            None if count is None or count % self.rows else count // self.rows
        )


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list of tensors, or of lists, each of which is laid out alike."""

    element: Sharded | Partial | ListOf


@dataclasses.dataclass(frozen=True)
class SparseIndices:
    """Of an input: where sparse rows have entries, from a tower's first row.

    Attributes:
        unit: the name of the unit of the entries.
    """

    unit: str


@dataclasses.dataclass(frozen=True)
class SparseShape:
    """Of an input: the shape of sparse rows, on a tower that of its own.

    Attributes:
        sizes: what is known of the sizes behind the first.
    """

    sizes: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class RowSplits:
    """Of an input: the splits of ragged rows, on a tower those of its own.

    Attributes:
        unit: the name of the unit of the entries.
    """

    unit: str


Layout: TypeAlias = Replicated | Sharded | Partial | ListOf
InputLayout: TypeAlias = Layout | SparseIndices | SparseShape | RowSplits

REPLICATED = Replicated()
PARTIAL = Partial()


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Integers that number rows, of which each tower names only its own.

    One device counts all rows: its numbers are those of a tower and the number
    of rows of the towers before it.

    Attributes:
        local: of each tower: the same integers, counted from its own first row.
            They are at least 0 and less than the number of its rows.
        layout: how these are laid out.
        unit: of what the rows are.
        rows: how many rows each unit has.
        grain: what divides all of them.
        is_first_column: whether only the first along the last axis are such,
            and the others are those of one device.
    """

    local: Tensor
    layout: Sharded
    unit: Unit | DataDependentUnit
    rows: int = 1
    grain: int = 1
    is_first_column: bool = False

    @property
    def target(self) -> Sharded:
        """The layout of the rows, along a first axis."""
        return Sharded(0, self.unit, 1, self.rows)


@dataclasses.dataclass(frozen=True)
class Below:
    """Integers that are at least 0 and less than a limit."""

    limit: int


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
    """Integers that say where ragged rows begin, where they end, or both.

    Attributes:
        local: of each tower: the same, counted from its own first entry.
        unit: of what the entries are.
        part: ``begin``, ``end``, or both, which is one more.
    """

    local: Tensor
    unit: DataDependentUnit
    part: str = "both"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WholeFrom:
    """A value that is computed of the wholes of others, which are exchanged.

    Attributes:
        operation: what computes it.
        index: which of its outputs it is.
        inputs: its N inputs.
        gathers: whether these are rows, which are gathered, not parts of sums.
    """

    operation: Any
    index: int
    inputs: Sequence[Value]
    gathers: bool


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A tensor of one device's step, and what towers have of it.

    Attributes:
        layout: how it is laid out.
        local: the tensor that each tower has: its rows, or its part of a sum;
            for a replicated value the whole, if each tower computed it.
        whole: the tensor that one device has; None: no operation has needed it
            so far.
        shape: its shape on one device: ints, ``Size`` and ``UNKNOWN``; None:
            its rank is unknown.
        known: its entries on one device that are known before the step runs: an
            array of ints, bools, ``Size`` and ``UNKNOWN``; None: no entry is.
        whole_from: of a part of a sum: how its whole is computed where it is
            not the sum of the parts.
        element: of a list: what is known of all its elements.
        numbers: of integers: what they number, or where they end.
    """

    layout: Layout
    local: Tensor | None = None
    whole: Tensor | None = None
    shape: Shape | None = None
    known: Any = None
    whole_from: WholeFrom | None = None
    element: Any = None
    numbers: Places | Below | Splits | None = None

    @property
    def rank(self) -> int:
        """The number of its axes, if that is known."""
        return len(self.shape or ())

    @property
    def sizes(self) -> Shape:
        """Its shape.

        Raises:
            NotDivided: if not even its rank is known.
        """
        require(self.shape is not None)
        return self.shape or ()

    def as_rows(self) -> tuple[Sharded, Tensor]:
        """Return where its rows are, and those that each tower has.

        Raises:
            NotDivided: if it is not sharded.
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
    def places(self) -> Places | None:
        """The rows that it numbers, if it does."""
        return self.numbers if isinstance(self.numbers, Places) else None

    @property
    def sharded(self) -> Sharded | None:
        """Where its rows are, if it is sharded."""
        return self.layout if isinstance(self.layout, Sharded) else None

    @property
    def is_replicated(self) -> bool:
        """Whether all have it, or it was made to be so."""
        if isinstance(self.layout, Replicated):
            return True
        return isinstance(self.layout, Partial) and self.whole is not None

    @property
    def gathers(self) -> bool:
        """Whether rows are gathered for its whole, not its parts added up."""
        return self.whole_from is not None and self.whole_from.gathers

    @property
    def is_partial(self) -> bool:
        """Whether it is a part of a sum that nobody has summed yet."""
        return isinstance(self.layout, Partial) and self.whole is None


def sizes_of(shape: Iterable[Any]) -> Shape:
    """Return the sizes of axes that the trace knows, and ``UNKNOWN``."""
    return tuple(UNKNOWN if size is None else size for size in shape)


def static(shape: Any) -> tf.TensorShape:
    """Return what TensorFlow knows of a shape with symbols."""
    if isinstance(shape, tf.TensorShape):
        return shape
    return tf.TensorShape([s if isinstance(s, int) else None for s in shape])


def local_shape(shape: tf.TensorShape, layout: Any) -> tf.TensorShape:
    """Return the shape on a tower of a tensor of the trace."""
    if shape.rank is None or not isinstance(layout, Sharded):
        return shape
    sizes = list(shape)
    sizes[layout.axis] = None
    return tf.TensorShape(sizes)
