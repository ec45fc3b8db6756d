"""Finds out which dimensions of a shape are numbers of examples.

A shape is followed backwards through the graph of a step to the tower's data.
"""

from __future__ import annotations

import fractions
import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context.rows import Rows
from keras_towers.fit.step import axes, slices

Dimension: TypeAlias = "int | str | tuple[int, ...] | None"
"""A dimension of a tower's tensor.

* an int: static;
* ``SAME``: not static, but the same on all towers;
* a tuple: a number of rows, in blocks one after another; block i has as many
  rows for each example as element i says;
* None: unknown.
"""

SAME = "same"

_ARITHMETIC = frozenset(
    (
        *("AddV2", "Add", "Sub", "Mul", "FloorDiv", "FloorMod", "RealDiv"),
        *("Maximum", "Minimum", "SelectV2", "Range", "Neg"),
    )
)
_GATHERS = ("Gather", "GatherV2")


class Dimensions:
    """Explains dimensions in the graph of a tower's step.

    Operations without a rule are assumed to keep one row for each example:
    that a dimension has the explained length has to be checked at run time.

    Args:
        rows: the tower's rows and data.
        found: what was explained before of the same graph; it is added to.
    """

    def __init__(self, rows: Rows, found: dict[Any, Dimension] | None = None):
        self._rows = rows
        # A shape that is made of those before it leads to them by more than
        # one way, and so do those: without notes, twice as many for each layer.
        self._found: dict[Any, Dimension] = {} if found is None else found

    def of_shape(self, shape: tf.Tensor) -> list[Dimension] | None:
        """Explain all dimensions that a shape tensor lists.

        Args:
            shape: integers of shape [rank].

        Returns:
            One entry for each dimension; None if the rank is unknown.
        """
        rank = shape.shape[0] if shape.shape.rank == 1 else None
        if rank is None:
            return None
        return [self.of_element(shape, index) for index in range(rank)]

    def of_element(self, vector: Any, index: int) -> Dimension:
        """Explain one element of a shape tensor."""
        while True:
            known = compat.constant_value_as_shape(vector)
            if known.rank is not None and known[index] is not None:
                return known[index]
            vector = outer(vector)
            if vector is None:
                return None
            op = vector.op
            if op.type in ("Shape", "ShapeN"):
                return self.of(op.inputs[vector.value_index], index)
            if op.type == "Pack":
                return self.of_scalar(op.inputs[index])
            if op.type in ("Reshape", "ExpandDims", "Fill", "BroadcastTo"):
                values = op.inputs[1 if op.type == "Fill" else 0]
                if values.shape.rank:
                    return None
                return self.of_scalar(values)
            if op.type in ("Cast", "Identity"):
                vector = op.inputs[0]
            elif op.type in _GATHERS and op.inputs[0].shape.rank == 1:
                places = tf.get_static_value(op.inputs[1])
                if places is None or places.ndim != 1:
                    return None
                vector, index = op.inputs[0], int(places[index])
            elif op.type == "StridedSlice":
                start = slices.start_of_slice(vector)
                if start is None:
                    return None
                vector, index = op.inputs[0], start[0] + index * start[1]
                if index < 0:
                    if vector.shape[0] is None:
                        return None
                    index += vector.shape[0]
            elif op.type == "ConcatV2":
                place = _in_parts(op.inputs[:-1], index)
                if place is None:
                    return None
                vector, index = place
            elif op.type in _ARITHMETIC and all(
                part.shape.rank in (0, 1) for part in op.inputs
            ):
                return _only_same(
                    self.of_element(part, index)
                    if part.shape.rank
                    else self.of_scalar(part)
                    for part in op.inputs
                )
            else:
                return None

    def of_scalar(self, scalar: Any) -> Dimension:
        """Explain a number that is computed in the graph."""
        while True:
            value = tf.get_static_value(scalar)
            if value is not None and value.size == 1:
                return int(value.reshape(()))
            scalar = outer(scalar)
            if scalar is None:
                return None
            op = scalar.op
            if op.type in ("Cast", "Identity", "Reshape", "Squeeze"):
                scalar = op.inputs[0]
                if scalar.shape.rank == 1:
                    return self.of_element(scalar, 0)
            elif op.type == "StridedSlice":
                start = slices.start_of_slice(scalar)
                if start is None:
                    return None
                length = op.inputs[0].shape[0]
                if start[0] < 0 and length is None:
                    return None
                place = start[0] + (length if start[0] < 0 else 0)
                return self.of_element(op.inputs[0], place)
            elif op.type in _GATHERS and op.inputs[0].shape.rank == 1:
                place = tf.get_static_value(op.inputs[1])
                if place is None or place.size != 1:
                    return None
                return self.of_element(op.inputs[0], int(place.reshape(())))
            elif op.type == "Prod" and op.inputs[0].shape.rank == 1:
                return _product(self.of_shape(op.inputs[0]))
            elif op.type in _ARITHMETIC:
                # A number of rows may be computed from that of examples in
                # more than one order of rows.
                return _only_same(
                    SAME
                    if part.shape.rank and slices.constant(part) is not None
                    else self.of_scalar(part)
                    for part in op.inputs
                )
            else:
                return None

    def of(self, tensor: Any, axis: int) -> Dimension:
        """Explain one dimension of a tensor."""
        key = tensor.ref(), axis
        if key not in self._found:
            self._found[key] = self._followed(tensor, axis)
        return self._found[key]

    def _followed(self, tensor: Any, axis: int) -> Dimension:
        scale = fractions.Fraction(1)
        while True:
            rank = tensor.shape.rank
            if rank is not None and tensor.shape[axis] is not None:
                return tensor.shape[axis]
            tensor = outer(tensor)
            if tensor is None:
                return None
            known = self._rows.known.get(tensor.ref())
            if known is not None:
                place, blocks = known
                return scaled(blocks if axis == place else SAME, scale)
            found = axes.source(self, tensor, axis)
            if not isinstance(found, slices.From):
                return scaled(found, scale)
            tensor, axis = found.tensor, found.axis
            scale *= found.scale


def outer(tensor: Any) -> Any:
    """Return what a function captured as this placeholder, else the tensor.

    Args:
        tensor: a tensor of any graph.

    Returns:
        A tensor with an operation; None for an argument of a function or an
        eager tensor.
    """
    while True:
        if not hasattr(tensor, "graph"):
            return None
        if tensor.op.type != "Placeholder":
            return tensor
        captures = getattr(tensor.graph, "captures", ())
        found = [value for value, inner in captures if inner is tensor]
        if not found:
            return None
        tensor = found[0]


def _in_parts(parts: Iterable[Any], index: int) -> tuple[Any, int] | None:
    """Find an element of concatenated vectors."""
    for part in parts:
        length = part.shape[0] if part.shape.rank == 1 else None
        if length is None:
            return None
        if index < length:
            return part, index
        index -= length
    return None


def _product(sizes: list[Dimension] | None) -> Dimension:
    """The product of a shape's dimensions."""
    if sizes is None:
        return None
    if all(isinstance(size, int) for size in sizes):
        return math.prod(sizes)  # type: ignore[arg-type]
    # Numbers of rows are followed by what is reshaped: the order of the rows
    # is not in their product.
    return _only_same(sizes)


def _only_same(parts: Iterable[Dimension]) -> Dimension:
    same = all(isinstance(part, (int, str)) for part in parts)
    return SAME if same else None


def scaled(found: Dimension, scale: fractions.Fraction) -> Dimension:
    """A dimension of so many rows for each row; None if that is no number."""
    if not isinstance(found, tuple) or scale == 1:
        return found
    blocks = [block * scale for block in found]
    if any(block.denominator != 1 for block in blocks):
        return None
    return tuple(int(block) for block in blocks)
