"""Converts values to the layouts that operations need.

A conversion is an exchange, a slice, or a partial sum. ``list_conversions.py``
converts lists.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

from keras_towers.partition.ir.axes import (
    AT_ROOT,
    COLUMNS,
    ONCE,
    SHARDS,
    TOWERS,
    Axes,
)
from keras_towers.partition.ir.builder import SIZE_DTYPE, static
from keras_towers.partition.ir.layouts import (
    REPLICATED,
    Layout,
    Partial,
    Sharded,
    local_shape,
)
from keras_towers.partition.ir.program import Tensor, axes_of
from keras_towers.partition.ir.reasons import (
    SHAPE,
    NotDivided,
    asserted,
    require,
)
from keras_towers.partition.ir.sizes import ASSUMED_LENGTH, Dimension
from keras_towers.partition.ir.values import Value
from keras_towers.partition.layout.units import Units

# The most operations in sequence whose rows are computed, not sliced.
# Each takes a few frames of Python.
_DEEPEST = 64


@dataclasses.dataclass(frozen=True)
class LayoutOptions:
    """Options of a layout.

    Attributes:
        axes: those of the axes of a batch along which there are several places.
        shard_axes: those along which variables in shards are divided.
        xla: whether XLA compiles the functions of towers.
        gather_ratio: the minimal ratio of the size of a sum over rows to the
            size of one unit's rows for which the rows are gathered and the sum
            is computed once; None: rows are never gathered for this.
        lists: whether lists of rows may be divided.
        undivided: types of operations that are computed once, because a rule
            has a mistake.
        may_coincide: whether what is drawn, or computed once from rows, has
            rows if it is as long as the batch by its static shape, or a
            multiple.
        examples: the number of examples to assume where it matters for the
            cost, but not for the result.
        over_columns: whether it is over the columns of a tower, of which each
            has all examples; the result is then laid out over towers. Gradients
            keep their operation, and a partial sum that several operations
            use is added up before them, as each might need another exchange.
    """

    axes: Axes = TOWERS
    shard_axes: Axes = SHARDS
    xla: bool = False
    gather_ratio: float | None = None
    lists: bool = True
    undivided: frozenset[str] = frozenset()
    may_coincide: bool = False
    examples: int = ASSUMED_LENGTH
    over_columns: bool = False


class Converter:
    """Converts tensors to other layouts; keeps the result of each conversion.

    Args:
        units: the units of the rows.
        is_first: a tensor: whether a tower is the first.
        is_first_micro_batch: a tensor: whether a micro-batch is its tower's
            first.
        options: the options of the layout.

    Attributes:
        builder: adds the operations.
        replaced_sums: the bytes of the sums in place of which rows are
            gathered, because of ``gather_ratio``.
    """

    def __init__(
        self,
        units: Units,
        is_first: Tensor,
        is_first_micro_batch: Tensor,
        options: LayoutOptions,
    ):
        self.builder = units.builder
        self.units = units
        self.is_first = is_first
        self.is_first_micro_batch = is_first_micro_batch
        self.options = options
        self.replaced_sums = 0
        # The wholes of variables in shards, by the axes along which each place
        # has its own.
        self._wholes: dict[tuple[Value, Axes], Tensor] = {}
        self._rows: dict[Hashable, Tensor] = {}
        self._parts: dict[Hashable, Tensor] = {}
        self._depth = 0

    def assemble(self, value: Value) -> Tensor:
        """Return the whole value; add an exchange if it is needed."""
        if value.shards is not None:
            return self._gather_shards(value, value.shards, ONCE)
        if value.whole is None:
            value.whole = self._assemble(value)
        return value.whole

    def _gather_shards(self, value: Value, layout: Sharded, to: Axes) -> Tensor:
        """Gather a variable's rows for all that use its whole.

        A timeline may gather them again.
        """
        if (value, to) not in self._wholes:
            whole = self._gather(layout, value.own, value.shape, to)
            self._wholes[value, to] = whole
        return self._wholes[value, to]

    def _assemble(self, value: Value) -> Tensor:
        if value.whole_from is not None:
            wholes = [self.assemble(part) for part in value.whole_from.inputs]
            outputs = self.builder.copy(value.whole_from.operation, wholes)
            whole = outputs[value.whole_from.index]
            if all(part.sharded for part in value.whole_from.inputs):
                size = asserted(whole.shape.num_elements())
                self.replaced_sums += whole.dtype.size * size
            return whole
        local = value.own
        if isinstance(value.layout, Partial):
            return self.builder.exchange("sum", local, sizes=value.shape)
        if isinstance(value.layout, Sharded):
            return self._gather(value.layout, local, value.shape)
        return self.builder.exchange("first", local)

    def _gather(
        self,
        layout: Sharded,
        local: Tensor,
        shape: Sequence[Dimension] | None,
        to: Axes = ONCE,
    ) -> Tensor:
        axis, unit = layout.axis, layout.unit
        gather = functools.partial(
            self.builder.exchange,
            "gather",
            to=to,
            units=_units_of(layout),
        )
        if layout.blocks == 1:
            return gather(local, axis, shape)
        # Every block has rows of all towers.
        shape = shape or ()
        split = self._reshape_blocks(local, layout, unit.count, shape, True)
        rows = layout.rows * unit.size
        sizes = [*shape[:axis], layout.blocks, rows, *shape[axis + 1 :]]
        gathered = gather(split, axis + 1, sizes)
        return self._reshape_blocks(gathered, layout, unit.total, shape, False)

    def _reshape_blocks(
        self,
        tensor: Tensor,
        layout: Sharded,
        units: Tensor,
        shape: Sequence[Dimension],
        splits: bool,
    ) -> Tensor:
        """Insert an axis of blocks before the axis of their rows, or drop it.

        Args:
            tensor: the tensor.
            layout: the layout of the rows.
            units: the number of units in the tensor.
            shape: the shape without the axis of blocks, in symbols. Sizes that
                it does not know are copied from the tensor.
            splits: whether to insert the axis.
        """
        axis, builder = layout.axis, self.builder
        rows = layout.rows if splits else layout.rows_per_unit
        changed: list[Tensor | Dimension] = [builder.scaled_size(rows, units)]
        # The offset to the index before of later axes.
        shift = 1
        if splits:
            changed.insert(0, layout.blocks)
            shift = -1
        sizes = [*shape[:axis], *changed, *shape[axis + 1 :]]
        before = builder.shape_vector(tensor)
        target = [
            size
            if isinstance(size, (int, Tensor))
            else builder.vector_entry(
                before, index if index < axis else index + shift
            )
            for index, size in enumerate(sizes)
        ]
        operands = [tensor, builder.size_vector(target, SIZE_DTYPE)]
        return builder.op("Reshape", operands, sizes)

    def reduce_over_towers(
        self,
        kind: str,
        own: Tensor,
        sizes: Sequence[Dimension | None] | None = None,
    ) -> Value:
        """Reduce the results of all towers to one.

        A tower without rows contributes the neutral element.

        Args:
            kind: the type of the reduction, such as ``Max``.
            own: the result of each tower for its own rows.
            sizes: its shape, in symbols, if it is known.
        """
        require(own.shape.rank is not None, SHAPE)
        row = self.builder.op("ExpandDims", [own, 0], [1, *own.shape])
        if sizes is not None:
            sizes = [None, *sizes]
        results = self.builder.exchange("gather", row, sizes=sizes)
        whole = self.builder.op(
            kind, [results, [0]], own.shape, keep_dims=False
        )
        return Value(REPLICATED, whole=whole)

    def replicate(self, value: Value) -> Tensor:
        """Return the whole value as a tensor on every tower."""
        if value.layout == REPLICATED and value.local is not None:
            return value.local
        if value.shards is not None:
            return self._gather_shards(value, value.shards, TOWERS)
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
            return value.own
        require(value.sizes[layout.axis] == layout.size)
        key = value, layout
        if key not in self._rows:
            may_scatter = value.is_partial and self.builder.can_exchange
            if may_scatter and layout.of_variables and layout.blocks == 1:
                self._rows[key] = self.scatter(value, layout)
            else:
                self._rows[key] = self._rows_of_whole(value, layout)
        return self._rows[key]

    def _rows_of_whole(self, value: Value, layout: Sharded) -> Tensor:
        """Slice each tower's rows from a value that is whole on every tower."""
        if value.rows_from is not None and self._depth < _DEEPEST:
            self._depth += 1
            try:
                return value.rows_from(layout)
            except NotDivided:
                pass
            finally:
                self._depth -= 1
        return self._slice_own_rows(value, layout)

    def scatter(self, value: Value, layout: Sharded) -> Tensor:
        """Sum a partial value over towers; return each tower's rows of the sum.

        Args:
            value: the partial sum.
            layout: the layout of the rows, in one block.
        """
        unit = layout.unit
        first, count = (
            self.builder.scaled_size(layout.rows, size)
            for size in (unit.start, unit.count)
        )
        local, to = value.own, axes_of((first, count))
        shape = local.shape.merge_with(static(value.sizes))
        # Ranks that have the same rows each get a sum of their own at first.
        apart = local.axes & AT_ROOT - to
        rows = self.builder.exchange(
            "scatter",
            local,
            layout.axis,
            value.shape,
            rows=(first, count),
            to=to,
            over=local.axes - COLUMNS - apart,
            shape=local_shape(shape, layout),
            units=_units_of(layout),
        )
        if not apart:
            return rows
        return self.builder.exchange("sum", rows, sizes=value.shape, over=apart)

    def as_term(self, part: Tensor) -> Tensor:
        """Return a tower's term of a sum; it varies along all axes.

        If several micro-batches or ranks have the same term, only the first one
        contributes it.
        """
        if self.options.axes <= part.axes:
            return part
        return self.builder.only_if(self.is_first_micro_batch, part)

    def _slice_own_rows(self, value: Value, layout: Sharded) -> Tensor:
        tensor, unit, axis = self.replicate(value), layout.unit, layout.axis
        first = self.builder.scaled_size(layout.rows, unit.start)
        count = self.builder.scaled_size(layout.rows, unit.count)
        shape: Any = value.shape
        if layout.blocks == 1:
            return self.builder.slice_rows(tensor, shape, axis, first, count)
        split = self._reshape_blocks(tensor, layout, unit.total, shape, True)
        sizes = [*shape[:axis], layout.blocks, *shape[axis:]]
        rows = self.builder.slice_rows(split, sizes, axis + 1, first, count)
        return self._reshape_blocks(rows, layout, unit.count, shape, False)

    def to_partial(self, value: Value) -> Tensor:
        """Return a partial sum: the whole on tower 0, zeros on the others."""
        if value.is_partial:
            return value.own
        if value not in self._parts:
            whole = self.replicate(value)
            self._parts[value] = self.builder.only_if(self.is_first, whole)
        return self._parts[value]

    def to_layout(self, value: Value, layout: Layout) -> Tensor:
        """Return the local tensor of a value in another layout.

        Raises:
            NotDivided: this would need an exchange.
        """
        require(value.is_replicated or value.layout == layout)
        if isinstance(layout, Sharded):
            return self.shard(value, layout)
        if isinstance(layout, Partial):
            return self.to_partial(value)
        return self.replicate(value)

    def size_vector_like(
        self, vector: Value, entries: Sequence[Tensor | Dimension | None]
    ) -> Tensor:
        """Return a vector of the same dtype and length with other entries.

        Args:
            vector: the vector.
            entries: the new entries: sizes or tensors; None: unchanged.
        """
        like = self.replicate(vector)
        if all(isinstance(entry, int) for entry in entries):
            return self.builder.constant(entries, like.dtype)
        sizes: list[Tensor] = []
        for index, entry in enumerate(entries):
            size = entry
            if size is not None and not isinstance(size, Tensor):
                size = self.units.global_size(size)
            if size is None:
                size = self.builder.vector_entry(like, index)
                size = self.builder.cast(size, SIZE_DTYPE)
            sizes.append(size)
        return self.builder.size_vector(sizes, like.dtype)

    def local_target(
        self, target: Value, sizes: Sequence[Dimension], layout: Sharded
    ) -> Tensor:
        """Return the local shape for an operation that takes a global shape.

        Args:
            target: the global shape, a vector.
            sizes: its entries, as far as they are known.
            layout: the layout of the output.
        """
        own: list[Tensor | Dimension | None] = list(sizes)
        own[layout.axis] = self.units.local_rows(layout)
        return self.size_vector_like(target, own)

    def captured(self, value: Value) -> Value:
        """Return a value as it is inside of a function that captures it."""
        if not value.is_replicated:
            return dataclasses.replace(value, whole_from=None)
        # Rows are computed outside of the function.
        own = functools.partial(self.shard, value)
        return dataclasses.replace(
            value,
            layout=REPLICATED,
            local=None,
            whole=self.replicate(value),
            whole_from=None,
            rows_from=own if value.rows_from is not None else None,
        )

    def gather_on_towers(self, value: Value, rows: Sharded) -> Tensor:
        """Gather rows of examples on every tower."""
        return self._gather(rows, value.own, value.shape, TOWERS)

    def gathered(self, value: Value) -> Value:
        """Return a value; if it is a variable's rows, gather them."""
        if value.shards is None:
            return value
        return Value(REPLICATED, self.replicate(value), shape=value.shape)


def _units_of(layout: Sharded) -> int | None:
    """Return the size of the sharded variable that rows belong to, or None."""
    return layout.unit.size if layout.of_variables else None
