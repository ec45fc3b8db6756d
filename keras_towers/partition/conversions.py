"""Converts values to the layouts that operations need.

A conversion is an exchange, a slice, or a partial sum. This module also builds
the tensors of sizes that conversions and rules take.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import SIZE, Builder
from keras_towers.partition.folding import LARGEST
from keras_towers.partition.layouts import (
    REPLICATED,
    DataDependentUnit,
    Layout,
    ListOf,
    NotDivided,
    Partial,
    Sharded,
    Unit,
    Value,
    require,
)
from keras_towers.partition.list_elements import gather_list, local_list
from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import (
    Size,
    data_dependent_symbol,
    symbol_name,
)


class CannotGather(Exception):
    """An operation without a rule takes a list that cannot be gathered."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a layout.

    Attributes:
        ranks: whether several processes run the program.
        xla: whether XLA compiles the functions of towers.
        gather_ratio: the minimal ratio of the size of a sum over rows to the
            size of one unit's rows for which the rows are gathered and the sum
            is computed once; None: rows are never gathered for this.
        lists: whether lists of rows may be divided.
    """

    ranks: bool = False
    xla: bool = False
    gather_ratio: float | None = None
    lists: bool = True


class Converter(Builder):
    """Converts values to layouts, each value once per layout.

    Args:
        unit: the unit of the batch: examples.
        is_first: a tensor: whether a tower is the first.
        options: the options of the layout.
        can_exchange: as in ``Builder``.

    Attributes:
        sizes: tensors of the global sizes that symbols stand for, by symbol.
        has_gathered: whether rows are gathered because of ``gather_ratio``.
        units: the data-dependent units, by the symbols of their sizes.
    """

    def __init__(
        self,
        unit: Unit,
        is_first: Tensor,
        options: Options,
        can_exchange: bool = True,
    ):
        super().__init__(can_exchange)
        self.unit = unit
        self.is_first = is_first
        self.options = options
        self.has_gathered = False
        self.sizes: dict[str, Tensor] = {}
        self.units: dict[str, DataDependentUnit] = {}
        self._unit_by_key: dict[Any, DataDependentUnit] = {}
        self._fractions: dict[Any, Tensor] = {}
        self._rows: dict[Any, Tensor] = {}
        self._parts: dict[Any, Tensor] = {}

    # ---- conversions ---------------------------------------------------------

    def assemble(self, value: Value) -> Tensor:
        """Return the whole value, adding an exchange if it is needed."""
        if value.whole is None:
            value.whole = self._assemble(value)
        return value.whole

    def _assemble(self, value: Value) -> Tensor:
        if isinstance(value.layout, ListOf):
            require(self.can_exchange)
            try:
                return gather_list(self, value)
            except NotDivided:
                raise CannotGather from None
        if value.whole_from is not None:
            wholes = [self.assemble(given) for given in value.whole_from.inputs]
            outputs = self.copy(value.whole_from.operation, wholes)
            return outputs[value.whole_from.index]
        local = cast("Tensor", value.local)
        if isinstance(value.layout, Partial):
            return self.exchange("sum", local)
        if isinstance(value.layout, Sharded):
            return self._gather(value.layout, local, value.shape or ())
        return self.exchange("first", local)

    def _gather(
        self, layout: Sharded, local: Tensor, shape: Sequence[Any]
    ) -> Tensor:
        axis, unit = layout.axis, layout.unit
        if layout.blocks == 1:
            return self.exchange("gather", local, axis, layout.size)
        # Every block has rows of all towers.
        split = self._split_blocks(local, layout, unit.count, shape)
        rows = layout.rows * unit.size
        gathered = self.exchange("gather", split, axis + 1, rows)
        return self._merge_blocks(gathered, layout, unit.total, shape)

    def _split_blocks(
        self, tensor: Tensor, layout: Sharded, units: Tensor, shape: Any
    ) -> Tensor:
        """Insert an axis of blocks before the axis of their rows."""
        axis, rows = layout.axis, self.scaled_size(layout.rows, units)
        sizes = [*shape[:axis], layout.blocks, rows, *shape[axis + 1 :]]
        return self._reshape(tensor, sizes, axis, -1)

    def _merge_blocks(
        self, tensor: Tensor, layout: Sharded, units: Tensor, shape: Any
    ) -> Tensor:
        axis, rows = layout.axis, self.scaled_size(layout.rows_per_unit, units)
        sizes = [*shape[:axis], rows, *shape[axis + 1 :]]
        return self._reshape(tensor, sizes, axis, 1)

    def _reshape(
        self, tensor: Tensor, sizes: Sequence[Any], axis: int, shift: int
    ) -> Tensor:
        """Reshape a tensor.

        Args:
            tensor: the tensor.
            sizes: the new shape: tensors, or sizes in symbols. Unknown ones are
                copied from the tensor.
            axis: the first axis that differs.
            shift: the offset to the old index of later axes.
        """
        before = self.shape_vector(tensor)
        target = [
            size
            if isinstance(size, (int, Tensor))
            else self.vector_entry(
                before, index if index < axis else index + shift
            )
            for index, size in enumerate(sizes)
        ]
        given = [tensor, self.size_vector(target, SIZE)]
        return self.op("Reshape", given, sizes)

    def replicate(self, value: Value) -> Tensor:
        """Return the whole value as a tensor on every tower."""
        if value.layout == REPLICATED and value.local is not None:
            return value.local
        return self.assemble(value)

    def shard(self, value: Value, layout: Sharded) -> Tensor:
        """Return each tower's rows of a value.

        Args:
            value: the value.
            layout: the layout of the rows.

        Raises:
            NotDivided: the value does not have these rows.
        """
        if value.layout == layout:
            return cast("Tensor", value.local)
        require(value.sizes[layout.axis] == layout.size)
        key = value, layout
        if key not in self._rows:
            self._rows[key] = self._slice_own_rows(value, layout)
        return self._rows[key]

    def _slice_own_rows(self, value: Value, layout: Sharded) -> Tensor:
        tensor, unit, axis = self.replicate(value), layout.unit, layout.axis
        first = self.scaled_size(layout.rows, unit.start)
        count = self.scaled_size(layout.rows, unit.count)
        shape: Any = value.shape
        if layout.blocks == 1:
            return self.slice_rows(tensor, shape, axis, first, count)
        split = self._split_blocks(tensor, layout, unit.total, shape)
        sizes = [*shape[:axis], layout.blocks, *shape[axis:]]
        rows = self.slice_rows(split, sizes, axis + 1, first, count)
        return self._merge_blocks(rows, layout, unit.count, shape)

    def to_partial(self, value: Value) -> Tensor:
        """Return a partial sum: the whole on the first tower, 0 on the rest."""
        if value.is_partial:
            return cast("Tensor", value.local)
        if value not in self._parts:
            whole = self.replicate(value)
            zeros = self.op("ZerosLike", [whole], whole.shape)
            self._parts[value] = self.op(
                "SelectV2", [self.is_first, whole, zeros], whole.shape
            )
        return self._parts[value]

    def to_layout(self, value: Value, layout: Layout) -> Tensor:
        """Return the local tensor of a value in another layout.

        Raises:
            NotDivided: this would need an exchange.
        """
        if isinstance(layout, ListOf):
            return local_list(self, value, layout)
        require(value.is_replicated or value.layout == layout)
        if isinstance(layout, Sharded):
            return self.shard(value, layout)
        if isinstance(layout, Partial):
            return self.to_partial(value)
        return self.replicate(value)

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
        return self.op("Shape", [tensor], is_repeated=True, out_type=SIZE)

    def global_size(self, size: Any) -> Tensor | None:
        """Return the tensor of a global size; None: it is not available."""
        if isinstance(size, (int, np.integer)):
            return self.constant(int(size), SIZE)
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
        return self.size_vector(entries, SIZE)

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
            [*sizes[:axis], count, *sizes[axis + 1 :]], SIZE
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

    def size_vector_like(self, vector: Value, entries: Sequence[Any]) -> Tensor:
        """Return a copy of a vector with other entries.

        Args:
            vector: the vector.
            entries: the new entries: sizes or tensors; None: unchanged.
        """
        like = self.replicate(vector)
        if all(isinstance(entry, int) for entry in entries):
            return self.constant(entries, like.dtype)
        found: list[Tensor] = []
        for index, entry in enumerate(entries):
            size = (
                entry if isinstance(entry, Tensor) else self.global_size(entry)
            )
            if size is None:
                size = self.cast(self.vector_entry(like, index), SIZE)
            found.append(size)
        return self.size_vector(found, like.dtype)

    def local_target(
        self, target: Value, sizes: Sequence[Any], layout: Sharded
    ) -> Tensor:
        """Return the local shape for an operation that takes a global one.

        Args:
            target: the global shape, a vector.
            sizes: its entries, as far as they are known.
            layout: the layout of the output.
        """
        own: list[Any] = list(sizes)
        own[layout.axis] = self.scaled_size(
            layout.rows_per_unit, layout.unit.count
        )
        return self.size_vector_like(target, own)


def is_small(shape: tf.TensorShape) -> bool:
    """Whether a tensor is too small to be worth an exchange."""
    size = shape.num_elements()
    return size is not None and size <= LARGEST
