"""Values in the layouts that operations need: exchanged, cut, or as parts.

Also what these take: the units of which towers have some, and sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import Builder, NeedsExchange
from keras_towers.partition.folding import LARGEST
from keras_towers.partition.layouts import (
    REPLICATED,
    FoundUnit,
    ListOf,
    Partial,
    RowSplits,
    Sharded,
    SparseIndices,
    Unit,
    Value,
)
from keras_towers.partition.list_elements import whole_list
from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import Size, name_of
from keras_towers.partition.sizes import own as own_size

# What sizes are computed in.
SIZE = tf.int64


class CannotGather(Exception):
    """A list of rows meets what has no rule."""


class Converter:
    """Gives operations the values that they need, each of them once.

    Args:
        unit: what the rows of a batch are divided by: examples.
        is_first: whether a tower is the first.
        sizes: symbols of sizes, and what they are: numbers that all have.
        builder: takes the operations.
    """

    def __init__(
        self,
        unit: Unit,
        is_first: Tensor,
        sizes: Mapping[str, Tensor],
        builder: Builder,
    ):
        self.unit = unit
        self.is_first = is_first
        self.sizes = dict(sizes)
        self.builder = builder
        self._shares: dict[Any, Tensor] = {}
        self._rows: dict[Any, Tensor] = {}
        self._parts: dict[Any, Tensor] = {}
        # By what they follow from, and by their symbols.
        self._found: dict[Any, FoundUnit] = {}
        self._units: dict[str, FoundUnit] = {}

    # ---- conversions ---------------------------------------------------------

    def whole(self, value: Value) -> Tensor:
        """Return the value of one device, which all have."""
        if value.whole is None:
            value.whole = self._whole(value)
        return value.whole

    def _whole(self, value: Value) -> Tensor:
        if isinstance(value.layout, ListOf):
            found = whole_list(self, value) if self.builder.meets else None
            if found is None:
                raise CannotGather if self.builder.meets else NeedsExchange
            return found
        if value.linear is not None:
            # Less to exchange, as it follows from what is needed elsewhere.
            source, index, inputs = value.linear
            wholes = [self.whole(given) for given in inputs]
            return self.builder.copy(source, wholes)[index]
        local = cast("Tensor", value.local)
        if isinstance(value.layout, Partial):
            return self.builder.exchange("sum", local)
        if isinstance(value.layout, Sharded):
            return self._gathered(value.layout, local, value.shape or ())
        return self.builder.exchange("first", local)

    def _gathered(
        self, layout: Sharded, local: Tensor, shape: Sequence[Any]
    ) -> Tensor:
        axis, build = layout.axis, self.builder
        if layout.blocks == 1:
            return build.exchange("gather", local, axis, layout.size)
        # Every block has rows of all towers.
        sizes = [*shape[:axis], layout.blocks, None, *shape[axis + 1 :]]
        own = self.times(layout.rows, layout.unit.count)
        split = self.reshaped(local, sizes, axis + 1, own, shape, axis)
        rows = layout.rows * layout.unit.size
        gathered = build.exchange("gather", split, axis + 1, rows)
        all_of_them = self.times(layout.count, layout.unit.total)
        joined = [*shape[:axis], None, *shape[axis + 1 :]]
        return self.reshaped(gathered, joined, axis, all_of_them, sizes, axis)

    def reshaped(
        self,
        tensor: Tensor,
        sizes: Sequence[Any],
        axis: int,
        count: Tensor,
        before: Sequence[Any],
        was: int,
    ) -> Tensor:
        """Return a tensor whose axis of rows is divided, or joined.

        Args:
            tensor: it.
            sizes: the sizes of the result, None where they are not known.
            axis: the axis of the result that has the rows.
            count: how many they are.
            before: the sizes of the tensor.
            was: the first axis of the tensor that is changed.
        """
        build = self.builder
        changed = len(before) - len(sizes)
        entries: list[Tensor] = []
        whole: Tensor | None = None
        for at, size in enumerate(sizes):
            if at == axis:
                entries.append(count)
            elif isinstance(size, int):
                entries.append(build.constant(size, SIZE))
            else:
                if whole is None:
                    whole = build.op(
                        "Shape", [tensor], is_repeated=True, out_type=SIZE
                    )
                place = at if at < was else at + changed
                entries.append(self.entry(whole, place))
        target = build.op(
            "Pack", entries, (len(entries),), is_repeated=True, axis=0
        )
        return build.op("Reshape", [tensor, target], static(sizes))

    def local(self, value: Value) -> Tensor:
        """Return the value of one device where a tower uses it."""
        if value.layout == REPLICATED and value.local is not None:
            return value.local
        return self.whole(value)

    def rows(self, value: Value, layout: Sharded) -> Tensor | None:
        """Return each tower's own rows of a value; None: it has no such.

        Args:
            value: the value.
            layout: where its rows are to be.
        """
        if value.layout == layout:
            return value.local
        if value.shape is None or value.shape[layout.axis] != layout.size:
            return None
        key = value, layout
        if key not in self._rows:
            self._rows[key] = self._own_rows(value, layout)
        return self._rows[key]

    def _own_rows(self, value: Value, layout: Sharded) -> Tensor:
        build, axis, tensor = self.builder, layout.axis, self.local(value)
        shape: list[Any] = list(value.shape or ())
        shape[axis] = None
        first = self.times(layout.rows, layout.unit.start)
        count = self.times(layout.rows, layout.unit.count)
        if layout.blocks == 1:
            places = [int(a == axis) for a in range(len(shape))]
            at = build.constant(places, SIZE)
            begin = build.op("Mul", [at, first])
            all_others = build.constant([p - 1 for p in places], SIZE)
            own = build.op("Mul", [at, count], is_repeated=True)
            size = build.op("AddV2", [all_others, own], is_repeated=True)
            return build.op("Slice", [tensor, begin, size], static(shape))
        zero, one = build.constant(0, SIZE), build.constant(1, SIZE)
        own = build.op("Range", [zero, count, one], (None,))
        own = build.op("AddV2", [own, first], (None,))
        blocks = build.constant(np.arange(layout.blocks)[:, None], SIZE)
        ahead = build.op(
            "Mul", [blocks, self.times(layout.rows, layout.unit.total)]
        )
        flat = build.op(
            "Reshape",
            [build.op("AddV2", [ahead, own]), build.constant([-1], SIZE)],
        )
        return build.op(
            "GatherV2",
            [tensor, flat, build.constant(axis, SIZE)],
            static(shape),
        )

    def partial(self, value: Value) -> Tensor:
        """Return each tower's part of a sum: the first tower has all of it."""
        if value.is_partial:
            return cast("Tensor", value.local)
        if value not in self._parts:
            whole = self.local(value)
            zeros = self.builder.op("ZerosLike", [whole], whole.shape)
            self._parts[value] = self.builder.op(
                "SelectV2", [self.is_first, whole, zeros], whole.shape
            )
        return self._parts[value]

    # ---- units ---------------------------------------------------------------

    def found_unit(self, key: Any, count: Tensor) -> FoundUnit:
        """Return the unit of what each tower has found.

        Args:
            key: what it follows from: for the same all towers find as many.
            count: how many a tower has found.
        """
        if key not in self._found:
            size = own_size(f"found{len(self._units)}")
            unit = FoundUnit(size, count, self.builder)
            self._found[key] = self._units[name_of(size)] = unit
        return self._found[key]

    def share(self, unit: Unit | FoundUnit, dtype: Any) -> Tensor:
        """Return of each tower the part of all that it has of a unit."""
        key = unit, dtype
        if key not in self._shares:
            counts = [
                self.cast(count, tf.float64)
                for count in (unit.count, unit.total)
            ]
            share = self.builder.op("RealDiv", counts, ())
            self._shares[key] = self.cast(share, dtype, is_repeated=False)
        return self._shares[key]

    def shares(self, layout: Sharded, dtype: Any, rank: int) -> Tensor:
        """Return the shares of all towers along the axis that has the rows."""
        key = layout.axis, layout.unit, dtype, rank
        if key not in self._shares:
            share, build = self.share(layout.unit, dtype), self.builder
            ones = (1,) * rank
            shape = build.constant(ones, tf.int32)
            own = build.op("Reshape", [share, shape], ones)
            self._shares[key] = build.exchange("gather", own, layout.axis)
        return self._shares[key]

    def note_unit(self, key: Any, unit: FoundUnit) -> None:
        """Note the unit of what each tower will find by a key."""
        self._found.setdefault(key, unit)

    def rows_along(self, axis: int, size: Any) -> Sharded | None:
        """Return the rows that an axis of some size has; None: it has none."""
        for unit in (self.unit, *self._units.values()):
            layout = Sharded(axis, unit)
            rows = layout.units_in(size)
            if rows:
                return dataclasses.replace(layout, rows=rows)
        return None

    # ---- sizes ---------------------------------------------------------------

    def times(self, number: int, tensor: Tensor) -> Tensor:
        """Return a number of sizes."""
        if number == 1:
            return tensor
        factor = self.builder.constant(number, SIZE)
        return self.builder.op("Mul", [tensor, factor], (), is_repeated=True)

    def entry(self, vector: Tensor, index: int) -> Tensor:
        """Return an entry of a vector."""
        build = self.builder
        ends = [build.constant([k], tf.int32) for k in (index, index + 1, 1)]
        return build.op(
            "StridedSlice",
            [vector, *ends],
            (),
            is_repeated=True,
            shrink_axis_mask=1,
        )

    def size(self, size: Any) -> Tensor | None:
        """Return a size of one device; None: nobody knows it yet."""
        if isinstance(size, (int, np.integer)):
            return self.builder.constant(int(size), SIZE)
        if not isinstance(size, Size) or not isinstance(size.number, int):
            return None
        result: Tensor | None = None
        for symbol, power in size.powers:
            factor = self._of_symbol(symbol)
            if factor is None or power < 1:
                return None
            for _ in range(power):
                if result is None:
                    result = factor
                    continue
                result = self.builder.op(
                    "Mul", [result, factor], (), is_repeated=True
                )
        return None if result is None else self.times(size.number, result)

    def _of_symbol(self, symbol: str) -> Tensor | None:
        if symbol in self._units:
            return self._units[symbol].total
        return self.sizes.get(symbol)

    def vector(self, entries: Sequence[Tensor], dtype: Any) -> Tensor:
        """Return a vector of sizes."""
        build, shape = self.builder, (len(entries),)
        if not entries:
            return build.constant([], dtype)
        found = build.op("Pack", entries, shape, is_repeated=True, axis=0)
        return self.cast(found, dtype)

    def cast(
        self, tensor: Tensor, dtype: Any, is_repeated: bool = True
    ) -> Tensor:
        """Return a tensor of another dtype."""
        if tensor.dtype == dtype:
            return tensor
        return self.builder.op(
            "Cast", [tensor], tensor.shape, is_repeated=is_repeated, DstT=dtype
        )

    def local_target(
        self, target: Value, sizes: Sequence[Any], layout: Sharded
    ) -> Tensor:
        """Return the shape that each tower makes its rows of.

        Args:
            target: the shape that one device makes: a vector.
            sizes: its entries, as far as they are known.
            layout: where the rows are.
        """
        own = self.times(layout.count, layout.unit.count)
        entries = [
            own if axis == layout.axis else self.size(size)
            for axis, size in enumerate(sizes)
        ]
        whole = [
            self.entry(self.local(target), axis) if entry is None else entry
            for axis, entry in enumerate(entries)
        ]
        dtype = self.local(target).dtype
        cast_ = [self.cast(entry, SIZE) for entry in whole]
        return self.vector(cast_, dtype)


def is_small(shape: tf.TensorShape) -> bool:
    """Whether a tensor of a shape is not worth an exchange of its own."""
    size = shape.num_elements()
    return size is not None and size <= LARGEST


def static(shape: Sequence[Any]) -> tf.TensorShape:
    """Return what TensorFlow knows of a shape with symbols."""
    return tf.TensorShape([s if isinstance(s, int) else None for s in shape])


def local_shape(shape: tf.TensorShape, layout: Any) -> tf.TensorShape:
    """Return the shape on a tower of a tensor of the trace."""
    if shape.rank is None:
        return shape
    sizes = list(shape)
    if isinstance(layout, Sharded):
        sizes[layout.axis] = None
    elif isinstance(layout, (RowSplits, SparseIndices)):
        sizes[0] = None
    return tf.TensorShape(sizes)
