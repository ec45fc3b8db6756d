"""Builds the tensors of sizes that operations on towers take."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import SIZE_DTYPE, Builder
from keras_towers.partition.layouts import DataDependentUnit, Sharded, Unit
from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import (
    Size,
    data_dependent_symbol,
    symbol_name,
)


class SizeBuilder(Builder):
    """Builds tensors of sizes, and keeps the units that they count.

    Args:
        unit: the unit of the batch: examples.
        can_exchange: as in ``Builder``.

    Attributes:
        sizes: tensors of the global sizes that symbols stand for, by symbol.
        units: the data-dependent units, by the symbols of their sizes.
    """

    def __init__(self, unit: Unit, can_exchange: bool = True):
        super().__init__(can_exchange)
        self.unit = unit
        self.sizes: dict[str, Tensor] = {}
        self.units: dict[str, DataDependentUnit] = {}
        self._unit_by_key: dict[Any, DataDependentUnit] = {}
        self._fractions: dict[Any, Tensor] = {}

    # ---- units ---------------------------------------------------------------

    def data_dependent_unit(self, key: Any, count: Tensor) -> DataDependentUnit:
        """Return the unit of rows that a tower has because of its data.

        Args:
            key: identifies the unit: equal keys yield the same unit.
            count: the number of units of each tower.
        """
        if key not in self._unit_by_key:
            size = data_dependent_symbol(f"found{len(self.units)}")
            unit = DataDependentUnit(size, count, self)
            self._unit_by_key[key] = self.units[symbol_name(size)] = unit
        return self._unit_by_key[key]

    def alias_unit(self, key: Any, unit: DataDependentUnit) -> None:
        """Have another key identify a unit, unless the key is in use."""
        self._unit_by_key.setdefault(key, unit)

    def unit_fraction(
        self, unit: Unit | DataDependentUnit, dtype: Any
    ) -> Tensor:
        """Return the fraction of all units that each tower has."""
        key = unit, dtype
        if key not in self._fractions:
            counts = [
                self.cast(count, tf.float64)
                for count in (unit.count, unit.total)
            ]
            fraction = self.op("RealDiv", counts, ())
            self._fractions[key] = self.cast(fraction, dtype, is_repeated=False)
        return self._fractions[key]

    def find_rows(self, axis: int, size: Any) -> Sharded | None:
        """Return the layout of an axis whose size is a multiple of a unit's."""
        for unit in (self.unit, *self.units.values()):
            layout = Sharded(axis, unit)
            rows = layout.rows_per_unit_in(size)
            if rows:
                return dataclasses.replace(layout, rows=rows)
        return None

    # ---- sizes ---------------------------------------------------------------

    def scaled_size(self, number: int, tensor: Tensor) -> Tensor:
        """Return ``number * tensor``."""
        return tensor if number == 1 else self.size_product(tensor, number)

    def local_rows(self, layout: Sharded) -> Tensor:
        """Return the local size of the axis of a layout."""
        return self.scaled_size(layout.rows_per_unit, layout.unit.count)

    def size_product(self, a: Tensor, b: Tensor | int) -> Tensor:
        """Return the product of two sizes."""
        return self.compute_size("Mul", a, b)

    def compute_size(self, type_: str, *sizes: Tensor | int) -> Tensor:
        """Compute a size from sizes.

        The operation is repeated in every function that uses the size.
        """
        return self.op(type_, sizes, (), is_repeated=True)

    def vector_entry(self, vector: Tensor, index: int) -> Tensor:
        """Return an entry of a vector."""
        return self.op(
            "StridedSlice",
            [vector, [index], [index + 1], [1]],
            (),
            is_repeated=True,
            shrink_axis_mask=1,
        )

    def axis_size(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Return the local size of an axis."""
        return self.vector_entry(self.shape_vector(tensor), axis)

    def shape_vector(self, tensor: Tensor) -> Tensor:
        """Return the local shape of a tensor, as a vector."""
        return self.op("Shape", [tensor], is_repeated=True, out_type=SIZE_DTYPE)

    def global_size(self, size: Any) -> Tensor | None:
        """Return the tensor of a global size; None: it is not available."""
        if isinstance(size, (int, np.integer)):
            return self.constant(int(size), SIZE_DTYPE)
        if not isinstance(size, Size) or not isinstance(size.number, int):
            return None
        factors: list[Tensor] = []
        for symbol, power in size.powers:
            unit = self.units.get(symbol)
            factor = self.sizes.get(symbol) if unit is None else unit.total
            if factor is None or power < 1:
                return None
            factors += [factor] * power
        return self.scaled_size(
            size.number, functools.reduce(self.size_product, factors)
        )

    def size_vector(
        self, entries: Sequence[Tensor | int], dtype: Any
    ) -> Tensor:
        """Pack sizes into a vector."""
        if not any(isinstance(entry, Tensor) for entry in entries):
            return self.constant(entries, dtype)
        shape = (len(entries),)
        packed = self.op("Pack", entries, shape, is_repeated=True, axis=0)
        return self.cast(packed, dtype)

    def size_at_axis(
        self, axis: int, rank: int, size: Tensor | int, rest: int
    ) -> Tensor:
        """Return a vector with a size at one axis, and a number at the rest.

        Args:
            axis: the index of the size.
            rank: the length of the vector.
            size: the size.
            rest: the number.
        """
        entries = [size if k == axis else rest for k in range(rank)]
        return self.size_vector(entries, SIZE_DTYPE)

    def slice_rows(
        self,
        tensor: Tensor,
        shape: Sequence[Any],
        axis: int,
        first: Tensor | int,
        count: Tensor,
    ) -> Tensor:
        """Slice a range of rows.

        Args:
            tensor: the tensor.
            shape: its shape, as far as it is known.
            axis: the axis of the rows.
            first: the index of the first row.
            count: the number of rows.
        """
        begin = self.size_at_axis(axis, len(shape), first, 0)
        # XLA needs explicit sizes in a slice whose begin is dynamic.
        sizes = [size if isinstance(size, int) else -1 for size in shape]
        size = self.size_vector(
            [*sizes[:axis], count, *sizes[axis + 1 :]], SIZE_DTYPE
        )
        known = [*shape[:axis], None, *shape[axis + 1 :]]
        return self.op("Slice", [tensor, begin, size], known)

    def cast(
        self, tensor: Tensor, dtype: Any, is_repeated: bool = True
    ) -> Tensor:
        """Cast a tensor, unless it has the dtype."""
        if tensor.dtype == dtype:
            return tensor
        return self.op(
            "Cast", [tensor], tensor.shape, is_repeated=is_repeated, DstT=dtype
        )
