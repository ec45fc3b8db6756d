"""Units: what rows are counted in, and the sizes that follow from them.

``layouts.py`` has ``Unit``; rules find the rows of an axis by ``Units``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_towers.partition.ir.builder import SIZE_DTYPE, Builder
from keras_towers.partition.ir.layouts import (
    DataDependentUnit,
    InShards,
    Sharded,
    Unit,
)
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import (
    NUMBERS,
    SHAPE,
    NotDivided,
    asserted,
    require,
    unless_none,
)
from keras_towers.partition.ir.sizes import (
    UNKNOWN,
    Dimension,
    Size,
    data_dependent_symbol,
    is_data_dependent,
    one_less,
    symbol,
    symbol_name,
)

AnyUnit: TypeAlias = "Unit | DataDependentUnit"


class Units:
    """The units of the rows of a graph, or of a function that it calls.

    Args:
        builder: adds the operations that compute sizes.
        of_batch: the unit of the batch: examples.
        around: for a function, the units of its caller.

    Attributes:
        found: the data-dependent units, by the symbols of their sizes.
        of_variables: the axes of variables in shards, by their sizes.
        sizes: tensors of the global sizes that symbols stand for, by symbol.
    """

    def __init__(
        self, builder: Builder, of_batch: Unit, around: Units | None = None
    ):
        self.builder = builder
        self.of_batch = of_batch
        self.found: dict[str, DataDependentUnit] = {}
        self.of_variables: dict[int, Unit] = {}
        self.sizes: dict[str, Tensor] = {}
        self._by_key: dict[Hashable, DataDependentUnit] = {}
        self._parts: dict[tuple[AnyUnit, Size], AnyUnit] = {}
        self._symbols: dict[AnyUnit, Size] = {}
        self._fractions: dict[Hashable, Tensor] = {}
        self._numbers = itertools.count()
        if around is not None:
            self.of_variables = around.of_variables
            self.sizes = around.sizes
            self._symbols = around._symbols
            self._numbers = around._numbers

    def rows_in(self, layout: InShards) -> Sharded:
        """Return the layout of the value of a variable in shards."""
        return Sharded(layout.axis, self.of_variables[layout.size])

    def in_function(self, builder: Builder) -> Units:
        """Return the units for a function that is called here.

        The counts of units that the function finds are tensors of its own.
        """
        inside = Units(builder, self.of_batch, self)
        inside.found.update(self.found)
        inside._by_key.update(self._by_key)
        inside._parts.update(self._parts)
        return inside

    def new_size(self, tensor: Tensor) -> Size:
        """Return a symbol for a size that first occurs here.

        It is equal on all towers.

        Args:
            tensor: the size, which is computed once.
        """
        size = symbol(f"size{next(self._numbers)}")
        self.sizes[symbol_name(size)] = tensor
        return size

    def symbol_of(self, unit: AnyUnit) -> Size:
        """Return a symbol that only the number of a unit has.

        Other sizes may equal a static number of examples.
        """
        if isinstance(unit.size, Size):
            return unit.size
        if unit not in self._symbols:
            self._symbols[unit] = self.new_size(unit.total)
        return self._symbols[unit]

    def data_dependent_unit(
        self, key: object, count: Tensor
    ) -> DataDependentUnit:
        """Return the unit of rows whose number depends on a tower's data.

        Args:
            key: identifies the unit: equal keys yield the same unit.
            count: the number of units of each tower.
        """
        if key not in self._by_key:
            size = data_dependent_symbol(f"found{next(self._numbers)}")
            unit = DataDependentUnit(size, count, self.builder)
            self._by_key[key] = self.found[symbol_name(size)] = unit
        return self._by_key[key]

    def found_rows(self, key: object, rows: Tensor) -> Sharded:
        """Return the layout of rows that each tower has found in its data.

        Args:
            key: identifies their unit, as for ``data_dependent_unit``.
            rows: those of a tower, along axis 0.
        """
        count = self.builder.axis_size(rows)
        return Sharded(0, self.data_dependent_unit(key, count))

    def alias_unit(self, key: object, unit: DataDependentUnit) -> None:
        """Let another key identify a unit, unless the key is in use."""
        self._by_key.setdefault(key, unit)

    def rows_of(
        self, axis: int, unit: AnyUnit, blocks: int, rows: Dimension
    ) -> Sharded:
        """Return the layout of an axis with so many rows of each unit.

        If the number varies between units, such as the length of texts, the
        rows are a unit of their own, part of the first one.

        Raises:
            NotDivided: the size is not available.
        """
        if isinstance(rows, int):
            return Sharded(axis, unit, blocks, rows)
        if not isinstance(rows, Size):
            raise NotDivided(NUMBERS)
        each = Size(1, rows.powers)
        return Sharded(axis, self._part_of(unit, each), blocks, rows.number)

    def _part_of(self, unit: AnyUnit, each: Size) -> AnyUnit:
        """Return the unit that is each n-th part of another one."""
        require(not is_data_dependent(each), NUMBERS)
        if (unit, each) not in self._parts:
            number = unless_none(self.global_size(each), NUMBERS)
            scaled = functools.partial(self.builder.compute_size, "Mul", number)
            size: Any = unit.size * each
            if isinstance(unit, DataDependentUnit):
                part: AnyUnit = DataDependentUnit(
                    size, scaled(unit.count), self.builder
                )
            else:
                require(not unit.of_variables)
                part = Unit(
                    size,
                    count=scaled(unit.count),
                    start=scaled(unit.start),
                    total=scaled(unit.total),
                )
            self._parts[unit, each] = part
        return self._parts[unit, each]

    def whole_unit(self, unit: AnyUnit) -> tuple[AnyUnit, Dimension]:
        """Return the unit that a unit is a part of, and the number of parts."""
        for (whole, each), part in self._parts.items():
            if part is unit:
                return whole, each
        return unit, 1

    def has_unit(self, unit: AnyUnit) -> bool:
        """Whether a unit was counted here, not in a function that is called."""
        known = (
            self.of_batch,
            *self.found.values(),
            *self._parts.values(),
            *self.of_variables.values(),
        )
        return any(unit is other for other in known)

    def unit_fraction(self, unit: AnyUnit, dtype: tf.DType) -> Tensor:
        """Return a tower's fraction of all units."""
        key = unit, dtype
        if key not in self._fractions:
            counts = [
                self.builder.cast(count, tf.float64)
                for count in (unit.count, unit.total)
            ]
            fraction = self.builder.op("RealDiv", counts, ())
            self._fractions[key] = self.builder.cast(
                fraction, dtype, is_repeated=False
            )
        return self._fractions[key]

    def find_rows(
        self, axis: int, size: Dimension, may_coincide: bool = False
    ) -> Sharded | None:
        """Return the layout of an axis whose size is a multiple of a unit's.

        Args:
            axis: the axis.
            size: its size.
            may_coincide: whether that may be a coincidence: a number, such as
                of the units of a layer, may equal a static number of examples.
        """
        if isinstance(size, int) and not may_coincide:
            return None
        units = self.of_batch, *self.found.values(), *self._parts.values()
        for unit in units:
            layout = Sharded(axis, unit)
            rows = layout.rows_per_unit_in(size)
            if rows is not None and rows > 0:
                return dataclasses.replace(layout, rows=rows)
        return None

    def find_row_axis(
        self, sizes: Sequence[Dimension], may_coincide: bool = False
    ) -> Sharded:
        """Return the layout of a tensor with these sizes.

        Args:
            sizes: the sizes.
            may_coincide: as for ``find_rows``.

        Raises:
            NotDivided: no axis has rows of a unit, or several may have.
        """
        layouts = [
            self.find_rows(a, n, may_coincide) for a, n in enumerate(sizes)
        ]
        first = layouts[0] if layouts else None
        if (
            first is not None
            and first.rows == 1
            and first.unit is self.of_batch
        ):
            # Any axis would be right, and examples are usually the first.
            return first
        grown = [
            layout
            for layout, size in zip(layouts, sizes, strict=True)
            if isinstance(size, Size) or layout is not None
        ]
        require(len(grown) == 1)
        return unless_none(grown[0])

    def local_rows(self, layout: Sharded) -> Tensor:
        """Return the local size of a sharded axis."""
        return self.builder.scaled_size(layout.rows_per_unit, layout.unit.count)

    def global_size(self, size: Dimension) -> Tensor | None:
        """Return the tensor of a global size; None: it is not available."""
        if isinstance(size, (int, np.integer)):
            return self.builder.constant(int(size), SIZE_DTYPE)
        if not isinstance(size, Size):
            return None
        factors: list[Tensor] = []
        for name, power in size.powers:
            unit, less = self.found.get(name), one_less(symbol(name))
            factor = self.sizes.get(name) if unit is None else unit.total
            if isinstance(less, Size):
                rows = unless_none(self.global_size(less), NUMBERS)
                factor = self.builder.compute_size("AddV2", rows, 1)
            if factor is None:
                return None
            factors += [factor] * power
        product = functools.partial(self.builder.compute_size, "Mul")
        return self.builder.scaled_size(
            size.number, functools.reduce(product, factors)
        )

    def known_tensor(self, entries: Any, dtype: tf.DType) -> Tensor | None:
        """Return a tensor of known entries; None: it cannot be computed.

        Args:
            entries: an array of ints, bools, ``Size`` and ``UNKNOWN``.
            dtype: the dtype of the tensor.
        """
        flat = list(np.ravel(entries))
        if not any(
            isinstance(entry, Size) or entry is UNKNOWN for entry in flat
        ):
            return self.builder.constant(entries, dtype)
        sizes = [self.global_size(entry) for entry in flat]
        if np.ndim(entries) > 1 or any(size is None for size in sizes):
            return None
        if not np.ndim(entries):
            return self.builder.cast(asserted(sizes[0]), dtype)
        return self.builder.size_vector([*map(asserted, sizes)], dtype)

    # ---- towers without rows -------------------------------------------------

    def pad_empty(self, tensor: Tensor, layout: Sharded) -> Tensor:
        """Append rows of zeros for one unit if the tower has none.

        Args:
            tensor: the tower's rows.
            layout: their layout.
        """
        require(tensor.shape.rank is not None, SHAPE)
        count, axis = layout.unit.count, layout.axis
        more = self.builder.compute_size("Sub", self.least_one(count), count)
        more = self.builder.scaled_size(layout.rows_per_unit, more)
        return self.builder.pad_axis(tensor, axis, 0, more, tensor.shape)

    def drop_padding(
        self, tensor: Tensor, sizes: Sequence[Dimension | None], layout: Sharded
    ) -> Tensor:
        """Drop the rows that ``pad_empty`` has appended.

        Args:
            tensor: the tower's rows.
            sizes: the global shape.
            layout: the layout of the rows.
        """
        count = self.local_rows(layout)
        return self.builder.slice_rows(tensor, sizes, layout.axis, 0, count)

    def least_one(self, count: Tensor) -> Tensor:
        """Return a number of rows, but at least 1."""
        return self.builder.compute_size("Maximum", count, 1)
