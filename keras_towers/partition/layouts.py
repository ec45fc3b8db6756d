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
from typing import Any, TypeAlias

from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import Size, times_in

Shape: TypeAlias = "tuple[Any, ...]"


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """What is divided over towers: examples, or what follows from them.

    Attributes:
        size: how many one device has: a symbol, or a number if it is known.
        count: how many a tower has; a number of the towers.
        start: how many the towers before it have.
        total: how many all have.
    """

    size: Any
    count: Tensor
    start: Tensor
    total: Tensor


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
        unit: what is divided; None: examples, where it is not yet known how
            many a tower has.
        blocks: the number of blocks.
        rows: the number of rows of each unit in a block.
    """

    axis: int
    unit: Unit = None  # type: ignore[assignment]
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


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list of tensors, or of lists, each of which is laid out alike."""

    element: Sharded | Partial | ListOf


Layout: TypeAlias = Replicated | Sharded | Partial | ListOf

REPLICATED = Replicated()
PARTIAL = Partial()


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A tensor of one device's step, and what towers have of it.

    Attributes:
        layout: how it is laid out.
        local: what each tower has: its rows or its part; of what is replicated
            the whole, if it was computed on each tower.
        whole: the value of one device, once it is there.
        shape: its shape on one device, in symbols; None: its rank is unknown.
        known: its entries, as far as they are known before the step runs: an
            array of objects.
        linear: of a part of a sum: the operation that it follows from linearly,
            which of its outputs it is, and the operation's inputs.
        element: of a list: what is known of all its elements.
    """

    layout: Layout
    local: Tensor | None = None
    whole: Tensor | None = None
    shape: Shape | None = None
    known: Any = None
    linear: tuple[Any, int, list[Value]] | None = None
    element: Any = None

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
    def is_partial(self) -> bool:
        """Whether it is a part of a sum that nobody has summed yet."""
        return isinstance(self.layout, Partial) and self.whole is None
