"""Values in the layouts that operations need: exchanged, cut, or as parts.

Also what these take: the units of which towers have some, and sizes.
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
    ListOf,
    NotDivided,
    Partial,
    Sharded,
    Unit,
    Value,
    require,
)
from keras_towers.partition.list_elements import whole_list
from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import Size, name_of, own_symbol


class CannotGather(Exception):
    """An operation without a rule needs a list of rows."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How a graph is laid out.

    Attributes:
        ranks: whether several processes run the program.
        xla: whether XLA compiles what towers compute.
        gather_ratio: how many times as many entries as one unit's rows a sum
            over all rows needs to have for the rows to be gathered, and the sum
            to be computed once; None: towers always add up parts of it.
        lists: whether lists of rows may be divided.
    """

    ranks: bool = False
    xla: bool = False
    gather_ratio: float | None = None
    lists: bool = True


class Converter(Builder):
    """Gives operations the values that they need, each of them once.

    Args:
        unit: what the rows of a batch are divided by: examples.
        is_first: whether a tower is the first.
        options: how the graph is laid out.
        meets: as of ``Builder``.

    Attributes:
        sizes: maps the symbol of a size to the tensor that holds its value, the
            same on all towers.
        has_gathered: whether rows are gathered because of ``gather_ratio``.
        units: other units, by what they follow from, and by the symbols of
            their sizes.
    """

    def __init__(
        self,
        unit: Unit,
        is_first: Tensor,
        options: Options,
        meets: bool = True,
    ):
        super().__init__(meets)
        self.unit = unit
        self.is_first = is_first
        self.options = options
        self.has_gathered = False
        self.sizes: dict[str, Tensor] = {}
        self.units: dict[Any, DataDependentUnit] = {}
        self._fractions: dict[Any, Tensor] = {}
        self._rows: dict[Any, Tensor] = {}
        self._parts: dict[Any, Tensor] = {}

    # ---- conversions ---------------------------------------------------------

    def whole(self, value: Value) -> Tensor:
        """Return the value of one device, which all have."""
        if value.whole is None:
            value.whole = self._whole(value)
        return value.whole

    def _whole(self, value: Value) -> Tensor:
        if isinstance(value.layout, ListOf):
            require(self.meets)
            try:
                return whole_list(self, value)
            except NotDivided:
                raise CannotGather from None
        if value.whole_from is not None:
            wholes = [self.whole(given) for given in value.whole_from.inputs]
            outputs = self.copy(value.whole_from.operation, wholes)
            return outputs[value.whole_from.index]
        local = cast("Tensor", value.local)
        if isinstance(value.layout, Partial):
            return self.exchange("sum", local)
        if isinstance(value.layout, Sharded):
            return self._gathered(value.layout, local, value.shape or ())
        return self.exchange("first", local)

    def _gathered(
        self, layout: Sharded, local: Tensor, shape: Sequence[Any]
    ) -> Tensor:
        axis, unit = layout.axis, layout.unit
        if layout.blocks == 1:
            return self.exchange("gather", local, axis, layout.size)
        # Every block has rows of all towers.
        apart = self._blocks_apart(local, layout, unit.count, shape)
        rows = layout.rows * unit.size
        gathered = self.exchange("gather", apart, axis + 1, rows)
        return self._blocks_joined(gathered, layout, unit.total, shape)

    def _blocks_apart(
        self, tensor: Tensor, layout: Sharded, units: Tensor, shape: Any
    ) -> Tensor:
        """Give blocks an axis of their own, ahead of that of their rows."""
        axis, rows = layout.axis, self.times(layout.rows, units)
        sizes = [*shape[:axis], layout.blocks, rows, *shape[axis + 1 :]]
        return self._reshaped(tensor, sizes, axis, -1)

    def _blocks_joined(
        self, tensor: Tensor, layout: Sharded, units: Tensor, shape: Any
    ) -> Tensor:
        axis, rows = layout.axis, self.times(layout.count, units)
        sizes = [*shape[:axis], rows, *shape[axis + 1 :]]
        return self._reshaped(tensor, sizes, axis, 1)

    def _reshaped(
        self, tensor: Tensor, sizes: Sequence[Any], axis: int, shift: int
    ) -> Tensor:
        """Return a tensor of other sizes.

        Args:
            tensor: the tensor.
            sizes: tensors, or sizes in symbols; those that are not known are
                those of the tensor.
            axis: the first axis that has another size.
            shift: by how much axes behind it were more to the right.
        """
        before = self.shape(tensor)
        target = [
            size
            if isinstance(size, (int, Tensor))
            else self.entry(before, index if index < axis else index + shift)
            for index, size in enumerate(sizes)
        ]
        given = [tensor, self.vector(target, SIZE)]
        return self.op("Reshape", given, sizes)

    def replicated(self, value: Value) -> Tensor:
        """Return the whole value, as every tower has it."""
        if value.layout == REPLICATED and value.local is not None:
            return value.local
        return self.whole(value)

    def rows(self, value: Value, layout: Sharded) -> Tensor:
        """Return each tower's own rows of a value.

        Args:
            value: the value.
            layout: where its rows are to be.

        Raises:
            NotDivided: if it has no such.
        """
        if value.layout == layout:
            return cast("Tensor", value.local)
        require(value.sizes[layout.axis] == layout.size)
        key = value, layout
        if key not in self._rows:
            self._rows[key] = self._own_rows(value, layout)
        return self._rows[key]

    def _own_rows(self, value: Value, layout: Sharded) -> Tensor:
        tensor, unit, axis = self.replicated(value), layout.unit, layout.axis
        first = self.times(layout.rows, unit.start)
        count = self.times(layout.rows, unit.count)
        shape: Any = value.shape
        if layout.blocks == 1:
            return self.sliced(tensor, shape, axis, first, count)
        apart = self._blocks_apart(tensor, layout, unit.total, shape)
        sizes = [*shape[:axis], layout.blocks, *shape[axis:]]
        rows = self.sliced(apart, sizes, axis + 1, first, count)
        return self._blocks_joined(rows, layout, unit.count, shape)

    def partial(self, value: Value) -> Tensor:
        """Return each tower's part of a sum: the first tower has all of it."""
        if value.is_partial:
            return cast("Tensor", value.local)
        if value not in self._parts:
            whole = self.replicated(value)
            zeros = self.op("ZerosLike", [whole], whole.shape)
            self._parts[value] = self.op(
                "SelectV2", [self.is_first, whole, zeros], whole.shape
            )
        return self._parts[value]

    # ---- units ---------------------------------------------------------------

    def data_dependent_unit(self, key: Any, count: Tensor) -> DataDependentUnit:
        """Return the unit of rows that a tower has because of its data.

        Args:
            key: what the unit follows from: the same key, the same unit.
            count: how many of them a tower has.
        """
        if key not in self.units:
            size = own_symbol(f"found{len(self.units)}")
            unit = DataDependentUnit(size, count, self)
            self.units[key] = self.units[name_of(size)] = unit
        return self.units[key]

    def fraction(self, unit: Unit | DataDependentUnit, dtype: Any) -> Tensor:
        """Return which part of all units each tower has."""
        key = unit, dtype
        if key not in self._fractions:
            counts = [
                self.cast(count, tf.float64)
                for count in (unit.count, unit.total)
            ]
            fraction = self.op("RealDiv", counts, ())
            self._fractions[key] = self.cast(fraction, dtype, is_repeated=False)
        return self._fractions[key]

    def rows_along(self, axis: int, size: Any) -> Sharded | None:
        """Return the rows that an axis of some size has; None: it has none."""
        for unit in (self.unit, *self.units.values()):
            layout = Sharded(axis, unit)
            rows = layout.units_in(size)
            if rows:
                return dataclasses.replace(layout, rows=rows)
        return None

    # ---- sizes ---------------------------------------------------------------

    def times(self, number: int, tensor: Tensor) -> Tensor:
        """Return a number of sizes."""
        return tensor if number == 1 else self.product(tensor, number)

    def product(self, a: Tensor, b: Tensor | int) -> Tensor:
        """Return the product of two sizes."""
        return self.calculated("Mul", a, b)

    def calculated(self, type_: str, *sizes: Tensor | int) -> Tensor:
        """Return a size that follows from others.

        Every function that needs it calculates it.
        """
        return self.op(type_, sizes, (), is_repeated=True)

    def entry(self, vector: Tensor, index: int) -> Tensor:
        """Return an entry of a vector."""
        return self.op(
            "StridedSlice",
            [vector, [index], [index + 1], [1]],
            (),
            is_repeated=True,
            shrink_axis_mask=1,
        )

    def length(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Return the size of an axis of a tensor, as towers have it."""
        return self.entry(self.shape(tensor), axis)

    def shape(self, tensor: Tensor) -> Tensor:
        """Return the sizes of all axes of a tensor, as towers have it."""
        return self.op("Shape", [tensor], is_repeated=True, out_type=SIZE)

    def size(self, size: Any) -> Tensor | None:
        """Return a size of one device; None: nobody knows it yet."""
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
        return self.times(size.number, functools.reduce(self.product, factors))

    def vector(self, entries: Sequence[Tensor | int], dtype: Any) -> Tensor:
        """Return a vector of sizes."""
        if not any(isinstance(entry, Tensor) for entry in entries):
            return self.constant(entries, dtype)
        shape = (len(entries),)
        packed = self.op("Pack", entries, shape, is_repeated=True, axis=0)
        return self.cast(packed, dtype)

    def along(
        self, axis: int, rank: int, size: Tensor | int, others: int
    ) -> Tensor:
        """Return a vector of a size for an axis, and a number for the others.

        Args:
            axis: the axis.
            rank: the number of axes.
            size: what is given for the axis.
            others: what is given for each of the others.
        """
        entries = [size if k == axis else others for k in range(rank)]
        return self.vector(entries, SIZE)

    def sliced(
        self,
        tensor: Tensor,
        shape: Sequence[Any],
        axis: int,
        first: Tensor | int,
        count: Tensor,
    ) -> Tensor:
        """Return some rows of a tensor.

        Args:
            tensor: the tensor.
            shape: its shape, as far as it is known.
            axis: the axis of the rows.
            first: the first of them.
            count: how many they are.
        """
        begin = self.along(axis, len(shape), first, 0)
        # XLA takes no size of -1 if it does not know where rows begin.
        sizes = [size if isinstance(size, int) else -1 for size in shape]
        size = self.vector([*sizes[:axis], count, *sizes[axis + 1 :]], SIZE)
        known = [*shape[:axis], None, *shape[axis + 1 :]]
        return self.op("Slice", [tensor, begin, size], known)

    def cast(
        self, tensor: Tensor, dtype: Any, is_repeated: bool = True
    ) -> Tensor:
        """Return a tensor of another dtype."""
        if tensor.dtype == dtype:
            return tensor
        return self.op(
            "Cast", [tensor], tensor.shape, is_repeated=is_repeated, DstT=dtype
        )

    def vector_like(self, vector: Value, entries: Sequence[Any]) -> Tensor:
        """Return a vector of sizes that towers are given.

        Args:
            vector: what one device is given.
            entries: sizes, or tensors of towers; None: as on one device.
        """
        like = self.replicated(vector)
        if all(isinstance(entry, int) for entry in entries):
            return self.constant(entries, like.dtype)
        found: list[Tensor] = []
        for index, entry in enumerate(entries):
            size = entry if isinstance(entry, Tensor) else self.size(entry)
            if size is None:
                size = self.cast(self.entry(like, index), SIZE)
            found.append(size)
        return self.vector(found, like.dtype)

    def local_target(
        self, target: Value, sizes: Sequence[Any], layout: Sharded
    ) -> Tensor:
        """Return the shape that each tower makes its rows of.

        Args:
            target: the shape that one device makes: a vector.
            sizes: its entries, as far as they are known.
            layout: where the rows are.
        """
        own: list[Any] = list(sizes)
        own[layout.axis] = self.times(layout.count, layout.unit.count)
        return self.vector_like(target, own)


def is_small(shape: tf.TensorShape) -> bool:
    """Whether a tensor of a shape is not worth an exchange of its own."""
    size = shape.num_elements()
    return size is not None and size <= LARGEST
