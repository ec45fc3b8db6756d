"""Converts values to the layouts that operations need.

A conversion is an exchange, a slice, or a partial sum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import SIZE_DTYPE, Builder
from keras_towers.partition.gathers import Gathers, whole_bytes
from keras_towers.partition.layouts import (
    REPLICATED,
    DataDependentUnit,
    InShards,
    Layout,
    ListOf,
    NotDivided,
    Partial,
    Sharded,
    Unit,
    Value,
    local_shape,
    require,
    static,
    unless_none,
)
from keras_towers.partition.list_conversions import gather_list, local_list
from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import (
    UNKNOWN,
    Size,
    data_dependent_symbol,
    symbol_name,
)


class CannotGather(Exception):
    """An operation without a rule takes a list that cannot be gathered."""


@dataclasses.dataclass(frozen=True)
class LayoutOptions:
    """Options of a layout.

    Attributes:
        ranks: whether several processes run the program.
        replicate_shards: whether each of them has all shards of variables.
        xla: whether XLA compiles the functions of towers.
        gather_ratio: the minimal ratio of the size of a sum over rows to the
            size of one unit's rows for which the rows are gathered and the sum
            is computed once; None: rows are never gathered for this.
        lists: whether lists of rows may be divided.
        micro_batches: whether towers have several micro-batches.
        gather_bytes: the budget for gathers of variables in shards, as in
            ``Gathers``.
        examples: the number of examples to assume where it matters for the
            cost, but not for the result.
        over_columns: whether it is over the columns of a tower, of which each
            has all examples; the result is then laid out over towers. Gradients
            keep their operation, and a partial sum that several
            operations use is added up before them, as each might need another
            exchange.
    """

    ranks: bool = False
    replicate_shards: bool = False
    xla: bool = False
    gather_ratio: float | None = None
    lists: bool = True
    micro_batches: bool = False
    gather_bytes: int = 2**29
    examples: int = 64
    over_columns: bool = False


class Converter(Builder):
    """Converts values to layouts, each value once per layout.

    It keeps the units that rows are counted in, and the sizes that symbols
    stand for.

    Args:
        unit: the unit of the batch: examples.
        is_first: a tensor: whether a tower is the first.
        is_first_part: a tensor: whether a micro-batch is its tower's first.
        options: the options of the layout.
        around: for the body of a function, the converter of its caller.

    Attributes:
        sizes: tensors of the global sizes that symbols stand for, by symbol.
        units: the data-dependent units, by the symbols of their sizes.
        variable_units: the axes of variables in shards, by their sizes.
        near: the level of the inputs of the operation that is being laid out.
        replaced_sums: the bytes of the sums in place of which rows are
            gathered, because of ``gather_ratio``.
    """

    def __init__(
        self,
        unit: Unit,
        is_first: Tensor,
        is_first_part: Tensor,
        options: LayoutOptions,
        around: Converter | None = None,
    ):
        super().__init__(can_exchange=around is None)
        self.unit = unit
        self.is_first = is_first
        self.is_first_part = is_first_part
        self.options = options
        if options.replicate_shards:
            self.shard_axes = ("towers",)
        self.replaced_sums = 0
        self.near = 0
        self.variable_units: dict[int, Unit] = {}
        self._gathers = Gathers(options.gather_bytes)
        self._rows: dict[Any, Tensor] = {}
        self._parts: dict[Any, Tensor] = {}
        self._fractions: dict[Any, Tensor] = {}
        self.sizes: dict[str, Tensor] = {}
        self.units: dict[str, DataDependentUnit] = {}
        self._unit_by_key: dict[Any, DataDependentUnit] = {}
        self._unit_numbers = itertools.count()
        if around is not None:
            self.sizes = around.sizes
            self.variable_units = around.variable_units
            # The counts of units that a function finds are its own tensors.
            self.units = dict(around.units)
            self._unit_by_key = dict(around._unit_by_key)
            self._unit_numbers = around._unit_numbers

    # ---- units ---------------------------------------------------------------

    def data_dependent_unit(self, key: Any, count: Tensor) -> DataDependentUnit:
        """Return the unit of rows that a tower has because of its data.

        Args:
            key: identifies the unit: equal keys yield the same unit.
            count: the number of units of each tower.
        """
        if key not in self._unit_by_key:
            size = data_dependent_symbol(f"found{next(self._unit_numbers)}")
            unit = DataDependentUnit(size, count, self)
            self._unit_by_key[key] = self.units[symbol_name(size)] = unit
        return self._unit_by_key[key]

    def alias_unit(self, key: Any, unit: DataDependentUnit) -> None:
        """Have another key identify a unit, unless the key is in use."""
        self._unit_by_key.setdefault(key, unit)

    def has_unit(self, unit: Unit | DataDependentUnit) -> bool:
        """Whether a unit is counted outside of the functions that it calls."""
        known = (self.unit, *self.units.values(), *self.variable_units.values())
        return any(unit is other for other in known)

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

    def find_row_axis(self, sizes: Sequence[Any]) -> Sharded:
        """Return the layout of a tensor with these sizes.

        Raises:
            NotDivided: no axis has rows of a unit, or several may have.
        """
        layouts = [self.find_rows(a, size) for a, size in enumerate(sizes)]
        first = layouts[0] if layouts else None
        if first is not None and first.rows == 1 and first.unit is self.unit:
            # Any axis would be right, and examples are usually the first.
            return first
        grown = [
            layout
            for layout, size in zip(layouts, sizes, strict=True)
            if isinstance(size, Size) or layout is not None
        ]
        require(len(grown) == 1)
        return unless_none(grown[0])

    def rows_in(self, layout: InShards) -> Sharded:
        """Return the layout of what a variable in shards holds."""
        return Sharded(layout.axis, self.variable_units[layout.size])

    def local_rows(self, layout: Sharded) -> Tensor:
        """Return the local size of the axis of a layout."""
        return self.scaled_size(layout.rows_per_unit, layout.unit.count)

    def global_size(self, size: Any) -> Tensor | None:
        """Return the tensor of a global size; None: it is not available."""
        if isinstance(size, (int, np.integer)):
            return self.constant(int(size), SIZE_DTYPE)
        if not isinstance(size, Size):
            return None
        factors: list[Tensor] = []
        for symbol, power in size.powers:
            unit = self.units.get(symbol)
            factor = self.sizes.get(symbol) if unit is None else unit.total
            if factor is None:
                return None
            factors += [factor] * power
        product = functools.partial(self.compute_size, "Mul")
        return self.scaled_size(size.number, functools.reduce(product, factors))

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
            return self.constant(entries, dtype)
        sizes = [self.global_size(entry) for entry in flat]
        if np.ndim(entries) > 1 or any(size is None for size in sizes):
            return None
        if not np.ndim(entries):
            return self.cast(unless_none(sizes[0]), dtype)
        return self.size_vector([*map(unless_none, sizes)], dtype)

    # ---- conversions ---------------------------------------------------------

    def assemble(self, value: Value) -> Tensor:
        """Return the whole value, adding an exchange if it is needed."""
        if value.sharded is not None and value.sharded.of_variables:
            return self._gather_late(value, value.sharded, on_towers=False)
        if value.whole is None:
            value.whole = self._assemble(value)
        return value.whole

    def _gather_late(
        self, value: Value, layout: Sharded, on_towers: bool
    ) -> Tensor:
        """Gather rows of a variable for the operation that is laid out."""
        local = unless_none(value.local)
        near = max(self.near, local.level)
        known = self._gathers.find(value, on_towers, near)
        if known is not None:
            return known
        size = whole_bytes(value)
        level = self._gathers.level_for(size, near, local.level)
        if level > local.level:
            tensors = [local]
            if level > near:
                # Nothing else makes it wait for that level.
                tensors.append(self._gathers.before(level))
            local, *_ = self.add(
                "IdentityN",
                tensors,
                {"T": [tensor.dtype for tensor in tensors]},
                [(tensor.dtype, tensor.shape) for tensor in tensors],
                least=level,
            )
        whole = self._gather(layout, local, value.shape, on_towers)
        self._gathers.add(value, on_towers, size, level, whole)
        return whole

    def _assemble(self, value: Value) -> Tensor:
        if isinstance(value.layout, ListOf):
            require(self.can_exchange)
            try:
                return gather_list(self, value)
            except NotDivided:
                raise CannotGather from None
        if value.whole_from is not None:
            wholes = [self.assemble(part) for part in value.whole_from.inputs]
            outputs = self.copy(value.whole_from.operation, wholes)
            whole = outputs[value.whole_from.index]
            if all(part.sharded for part in value.whole_from.inputs):
                size = unless_none(whole.shape.num_elements())
                self.replaced_sums += whole.dtype.size * size
            return whole
        local = unless_none(value.local)
        if isinstance(value.layout, Partial):
            return self.exchange("sum", local, sizes=value.shape)
        if isinstance(value.layout, Sharded):
            return self._gather(value.layout, local, value.shape)
        return self.exchange("first", local)

    def _gather(
        self,
        layout: Sharded,
        local: Tensor,
        shape: Sequence[Any] | None,
        on_towers: bool = False,
    ) -> Tensor:
        axis, unit = layout.axis, layout.unit
        gather = functools.partial(
            self.exchange,
            "gather",
            on_towers=on_towers,
            units=_units_of(layout),
        )
        if layout.blocks == 1:
            return gather(local, axis, shape)
        # Every block has rows of all towers.
        shape = shape or ()
        split = self._split_blocks(local, layout, unit.count, shape)
        rows = layout.rows * unit.size
        sizes = [*shape[:axis], layout.blocks, rows, *shape[axis + 1 :]]
        gathered = gather(split, axis + 1, sizes)
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
        operands = [tensor, self.size_vector(target, SIZE_DTYPE)]
        return self.op("Reshape", operands, sizes)

    def reduce_over_towers(
        self, kind: str, own: Tensor, sizes: Sequence[Any] | None = None
    ) -> Value:
        """Reduce the results of all towers to one.

        Without rows, a tower's own result is the neutral element.

        Args:
            kind: the type of the reduction, such as ``Max``.
            own: the result of each tower for its own rows.
            sizes: its shape, in symbols, if it is known.
        """
        require(own.shape.rank is not None)
        row = self.op("ExpandDims", [own, 0], [1, *own.shape])
        sizes = [None, *sizes] if sizes is not None else None
        results = self.exchange("gather", row, sizes=sizes)
        whole = self.op(kind, [results, [0]], own.shape, keep_dims=False)
        return Value(REPLICATED, whole=whole)

    def replicate(self, value: Value) -> Tensor:
        """Return the whole value as a tensor on every tower."""
        if value.layout == REPLICATED and value.local is not None:
            return value.local
        if value.sharded is not None and value.sharded.of_variables:
            return self._gather_late(value, value.sharded, on_towers=True)
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
            return unless_none(value.local)
        require(value.sizes[layout.axis] == layout.size)
        key = value, layout
        if key not in self._rows:
            may_scatter = value.is_partial and self.can_exchange
            if may_scatter and layout.of_variables and layout.blocks == 1:
                self._rows[key] = self.scatter(value, layout)
            else:
                self._rows[key] = self._slice_own_rows(value, layout)
        return self._rows[key]

    def scatter(self, value: Value, layout: Sharded) -> Tensor:
        """Add up a partial sum; return each tower's rows of the result.

        Args:
            value: the partial sum.
            layout: the layout of the rows, in one block.
        """
        unit = layout.unit
        first, count = (
            self.scaled_size(layout.rows, size)
            for size in (unit.start, unit.count)
        )
        local, shape = unless_none(value.local), static(value.sizes)
        rows = self.exchange(
            "scatter",
            local,
            layout.axis,
            value.shape,
            (first, count),
            local_size=local_shape(shape, layout)[layout.axis],
            units=_units_of(layout),
            over=self.shard_axes,
        )
        if "ranks" in self.shard_axes or not local.of_batch:
            return rows
        return self.exchange("sum", rows, sizes=value.shape, over=("ranks",))

    def once_per_tower(self, part: Tensor) -> Tensor:
        """Return a term of a sum over all micro-batches, given one of towers.

        Only the first micro-batch of a tower contributes it, and of processes
        that have the same shards only the first.
        """
        options = self.options
        is_repeated = options.micro_batches or options.replicate_shards
        if part.of_batch or not is_repeated:
            return part
        zeros = self.op("ZerosLike", [part], part.shape)
        return self.op(
            "SelectV2", [self.is_first_part, part, zeros], part.shape
        )

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
            return unless_none(value.local)
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

    def size_vector_like(self, vector: Value, entries: Sequence[Any]) -> Tensor:
        """Return a copy of a vector with other entries.

        Args:
            vector: the vector.
            entries: the new entries: sizes or tensors; None: unchanged.
        """
        like = self.replicate(vector)
        if all(isinstance(entry, int) for entry in entries):
            return self.constant(entries, like.dtype)
        sizes: list[Tensor] = []
        for index, entry in enumerate(entries):
            size = (
                entry if isinstance(entry, Tensor) else self.global_size(entry)
            )
            if size is None:
                size = self.cast(self.vector_entry(like, index), SIZE_DTYPE)
            sizes.append(size)
        return self.size_vector(sizes, like.dtype)

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
        own[layout.axis] = self.local_rows(layout)
        return self.size_vector_like(target, own)

    # ---- towers without rows -------------------------------------------------

    def pad_empty(self, tensor: Tensor, layout: Sharded) -> Tensor:
        """Append rows of zeros for one unit if the tower has none.

        Args:
            tensor: the tower's rows.
            layout: their layout.
        """
        rank, count = unless_none(tensor.shape.rank), layout.unit.count
        more = self.compute_size("Sub", self.least_one(count), count)
        more = self.scaled_size(layout.rows_per_unit, more)
        ends = [[0] * rank, self.size_at_axis(layout.axis, rank, more)]
        widths = self.op("Pack", ends, (rank, 2), is_repeated=True, axis=1)
        # OneDNN would fuse "Pad" with a convolution, without padding.
        zero = self.constant(0, tensor.dtype)
        return self.op("PadV2", [tensor, widths, zero], tensor.shape)

    def drop_padding(
        self, tensor: Tensor, sizes: Sequence[Any], layout: Sharded
    ) -> Tensor:
        """Drop the rows that ``pad_empty`` has appended.

        Args:
            tensor: the tower's rows.
            sizes: the global shape.
            layout: the layout of the rows.
        """
        count = self.local_rows(layout)
        return self.slice_rows(tensor, sizes, layout.axis, 0, count)

    def least_one(self, count: Tensor) -> Tensor:
        """Return a number of rows, or 1 if it is 0."""
        return self.compute_size("Maximum", count, 1)


def _units_of(layout: Sharded) -> int | None:
    """Return the size of the axis of variables that rows are of, or None."""
    return layout.unit.size if layout.of_variables else None
