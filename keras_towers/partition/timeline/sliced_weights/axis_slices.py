"""Slices of an axis that towers divide: cutting, and putting together.

A slice has a part of each tower's rows, so that all towers take part in each
exchange. Its rows are not consecutive on one device, with two towers and two
slices::

    rows of one device     0 1 2 3 4 5 6 7
    rows of towers         0 0 0 0 1 1 1 1
    slices                 0 0 1 1 0 0 1 1

``weight_slices.py`` divides a program by them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from keras_towers.partition.ir.builder import SIZE_DTYPE, Builder
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.tensor_sizes import TensorSizes


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an axis is cut into slices.

    Attributes:
        own: the number of rows of each tower.
        towers: the number of towers whose rows the axis has.
        number: the number of slices.
    """

    own: int
    towers: int
    number: int

    @property
    def parts(self) -> list[tuple[int, int]]:
        """For each slice the first of a tower's rows, and their number."""
        ends = [self.own * k // self.number for k in range(self.number + 1)]
        return [(a, b - a) for a, b in itertools.pairwise(ends)]

    @property
    def of_tower(self) -> Cut:
        """The same slices of an axis with the rows of one tower."""
        return dataclasses.replace(self, towers=1)

    def size(self, index: int) -> int:
        """Return the size of the axis in a slice."""
        return self.towers * self.parts[index][1]


class Slicer:
    """Adds operations that cut tensors, and put slices together.

    Args:
        builder: adds the operations.
        sizes: the sizes of tensors; gets those of what is added.
    """

    def __init__(self, builder: Builder, sizes: TensorSizes):
        self._builder, self._sizes = builder, sizes

    def slice_of(
        self, tensor: Tensor, axis: int, cut: Cut, index: int
    ) -> Tensor:
        """Return a slice of a tensor, for one user."""
        first, count = cut.parts[index]
        is_whole = cut.towers > 1
        rows, at = tensor, axis
        if is_whole:
            at = axis + 1
            rows = self._with_axes(tensor, tensor, axis, [cut.towers, cut.own])
        shape = [*rows.shape]
        begin = [first if k == at else 0 for k in range(len(shape))]
        size = [count if k == at else -1 for k in range(len(shape))]
        shape[at] = count
        part = self._builder.op("Slice", [rows, begin, size], shape)
        own = [cut.towers, count] if is_whole else [count]
        self._sizes.add_changed(part, tensor, axis, own)
        if not is_whole:
            return part
        return self._with_axes(part, tensor, axis, [cut.towers * count], 2)

    def joined(self, slices: Sequence[Tensor], axis: int, cut: Cut) -> Tensor:
        """Put slices together."""
        first, at = slices[0], axis
        if cut.towers > 1:
            at = axis + 1
            slices = [
                self._with_axes(t, t, axis, [cut.towers, count])
                for t, (_, count) in zip(slices, cut.parts, strict=True)
            ]
        shape = [*slices[0].shape]
        shape[at] = cut.own
        whole = self._builder.op("ConcatV2", [*slices, at], shape)
        own = [cut.towers, cut.own] if cut.towers > 1 else [cut.own]
        self._sizes.add_changed(whole, first, axis, own)
        if cut.towers == 1:
            return whole
        return self._with_axes(whole, first, axis, [cut.towers * cut.own], 2)

    def _with_axes(
        self,
        tensor: Tensor,
        like: Tensor,
        axis: int,
        sizes: Sequence[int],
        number: int = 1,
    ) -> Tensor:
        """Reshape axes of a tensor.

        Args:
            tensor: the tensor.
            like: what has the shape of the result but for an axis.
            axis: the first axis that changes.
            sizes: the axes in its place.
            number: the number of axes that change.
        """
        before, after = tensor.shape[:axis], tensor.shape[axis + number :]
        shape = [*before, *sizes, *after]
        target: list[Any] = [*shape]
        if target.count(None) == 1:
            target[target.index(None)] = -1
        elif None in target:
            vector = self._builder.shape_vector(tensor)
            shift = number - len(sizes)
            target = [
                self._builder.vector_entry(vector, k if k < axis else k + shift)
                if size is None
                else size
                for k, size in enumerate(target)
            ]
        operands = [tensor, self._builder.size_vector(target, SIZE_DTYPE)]
        found = self._builder.op("Reshape", operands, shape)
        self._sizes.add_changed(found, like, axis, sizes)
        return found

    def own_numbers(
        self, numbers: Tensor, cut: Cut, index: int
    ) -> tuple[Tensor, Tensor]:
        """Return row numbers within a slice, and which of them are in it.

        Args:
            numbers: row numbers of the whole axis.
            cut: how it is cut.
            index: the slice.
        """
        builder, shape = self._builder, numbers.shape
        first, count = cut.parts[index]
        tower = builder.op("FloorDiv", [numbers, cut.own], shape)
        own = builder.op("FloorMod", [numbers, cut.own], shape)
        own = builder.op("Sub", [own, first], shape)
        inside = self._within(own, count)
        whole = self._within(numbers, cut.towers * cut.own)
        inside = builder.op("LogicalAnd", [inside, whole], shape)
        before = builder.op("Mul", [tower, count], shape)
        return builder.op("AddV2", [before, own], shape), inside

    def in_table(
        self, numbers: Tensor, cut: Cut, index: int
    ) -> tuple[Tensor, Tensor]:
        """Return row numbers to look up in a slice, and which are in it.

        A number outside of the whole stays as it is, so that a lookup refuses
        it as on one device.
        """
        builder, shape = self._builder, numbers.shape
        own, inside = self.own_numbers(numbers, cut, index)
        whole = self._within(numbers, cut.towers * cut.own)
        others = builder.op("SelectV2", [whole, 0, numbers], shape)
        return builder.op("SelectV2", [inside, own, others], shape), inside

    def _within(self, numbers: Tensor, size: int) -> Tensor:
        builder, shape = self._builder, numbers.shape
        ends = [
            builder.op(type_, [numbers, end], shape)
            for type_, end in (("GreaterEqual", 0), ("Less", size))
        ]
        return builder.op("LogicalAnd", ends, shape)
