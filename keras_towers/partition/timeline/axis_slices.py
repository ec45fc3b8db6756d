"""Slices of an axis that towers divide, and the operations on one slice.

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
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.ir.builder import SIZE_DTYPE, Builder
from keras_towers.partition.ir.layouts import REPLICATED, sizes_of
from keras_towers.partition.ir.program import Operation, Tensor, is_pure
from keras_towers.partition.ir.reasons import NotDivided, require
from keras_towers.partition.ir.registry import Factors, Labels, NewAxis, facts_of
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.ir.values import Value


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
        self._found: dict[tuple[Tensor, int, Cut, int], Tensor] = {}

    def slice_of(
        self, tensor: Tensor, axis: int, cut: Cut, index: int
    ) -> Tensor:
        """Return a slice of a tensor."""
        key = tensor, axis, cut, index
        if key not in self._found:
            self._found[key] = self._cut(*key)
        return self._found[key]

    def _cut(self, tensor: Tensor, axis: int, cut: Cut, index: int) -> Tensor:
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


class _OperationAsNode:
    """An operation of a program, as functions that label its axes see nodes.

    Args:
        operation: the operation.
    """

    def __init__(self, operation: Operation):
        self.type: str = operation.type
        self._operation = operation

    @property
    def num_outputs(self) -> int:
        return len(self._operation.outputs)

    @property
    def shapes(self) -> list[tf.TensorShape]:
        return [tensor.shape for tensor in self._operation.outputs]

    def attr(self, name: str) -> Any:
        value = self._operation.attributes[name]
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [*found.i] if kind == "list" else found

    def dtype(self, index: int) -> tf.DType:
        return self._operation.inputs[index].dtype

    def output_dtype(self, index: int = 0) -> tf.DType:
        return self._operation.outputs[index].dtype


@dataclasses.dataclass(frozen=True)
class AxesOf:
    """The axes of an operation that can run on slices, by their labels.

    Attributes:
        factors: what is known of them.
        inputs: the labels of the axes of each input; None: it is broadcast.
    """

    factors: Factors
    inputs: Sequence[Labels]

    def label_of_input(self, index: int, axis: int) -> Hashable | None:
        """Return the label of an axis of an input along which it can run."""
        label = self.inputs[index][axis]
        return label if self.factors.may_divide(label) else None

    def label_of_output(self, index: int, axis: int) -> Hashable | None:
        """Return the label of an axis of an output along which it can run."""
        label = (self.factors.outputs[index] or ())[axis]
        is_new = isinstance(label, NewAxis)
        return label if not is_new and self.factors.may_divide(label) else None

    def axis_of_input(self, index: int, label: Hashable) -> int | None:
        """Return the axis of an input with a label."""
        labels = self.inputs[index]
        return labels.index(label) if label in labels else None

    def axis_of_output(self, index: int, label: Hashable) -> int | None:
        """Return the axis of an output with a label."""
        labels = self.factors.outputs[index] or ()
        return labels.index(label) if label in labels else None


def axes_of_operation(operation: Operation) -> AxesOf | None:
    """Return the axes of an operation; None: it cannot run on slices."""
    facts = facts_of(operation.type)
    if facts.labels is None or not is_pure(operation):
        return None
    values = [
        Value(
            REPLICATED,
            whole=tensor,
            shape=sizes_of(tensor.shape),
            known=_known(tensor),
        )
        for tensor in operation.inputs
        if tensor.shape.rank is not None
    ]
    try:
        require(len(values) == len(operation.inputs))
        factors = facts.labels(_OperationAsNode(operation), *values)
        require(not factors.attributes and not factors.needs_rows)
        return AxesOf(factors, factors.labels(values))
    except NotDivided:
        return None


def _known(tensor: Tensor) -> Any:
    source = tensor.operation
    if source is None or source.type != "Const" or tensor.dtype == tf.string:
        return None
    value = tf.make_ndarray(source.attributes["value"].tensor)
    return value if value.dtype.kind in "iub" else None
