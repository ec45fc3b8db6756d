"""The rules of operations by their types, and operations as rules see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import tensorflow as tf

from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import (
    Layout,
    Shape,
    Sharded,
    Value,
    Values,
    local_shape,
    static,
)
from keras_towers.partition.program import Tensor

if TYPE_CHECKING:
    from keras_towers.partition.partitioner import Partitioner

# Takes the operation and the values of its inputs, and returns those of its
# outputs. What raises ``NotDivided`` does not fit: the next is
# asked, then the axes; then the operation is computed once.
Rule: TypeAlias = "Callable[..., Values]"
# Takes the operation and the values of its inputs, whose ranks are known, and
# returns its axes.
Axes: TypeAlias = "Callable[..., Factors]"
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

RULES: dict[str, list[Rule]] = {}
AXES: dict[str, Axes] = {}
# Functions that return the shape that all outputs have on one device.
SHAPES: dict[str, Callable[..., Shape]] = {}
# Functions that note on outputs what is known of their entries.
NOTES: dict[str, list[Callable[..., None]]] = {}


class Node:
    """An operation of a traced graph, as it is laid out.

    Attributes:
        operation: the operation.
        partition: lays it out.
        type: its type.
    """

    def __init__(self, operation: Any, partition: Partitioner):
        self.operation = operation
        self.partition = partition
        self.type: str = operation.type

    @property
    def num_outputs(self) -> int:
        """Number of outputs."""
        return len(self.operation.outputs)

    @property
    def shapes(self) -> list[tf.TensorShape]:
        """The shapes of its outputs, as far as the trace knows them."""
        return [tensor.shape for tensor in self.operation.outputs]

    def attr(self, name: str) -> Any:
        """Return an attribute."""
        return self.operation.get_attr(name)

    def dtype(self, index: int) -> tf.DType:
        """Return the dtype of an input."""
        return self.operation.inputs[index].dtype

    def output_dtype(self, index: int = 0) -> tf.DType:
        """Return the dtype of an output."""
        return self.operation.outputs[index].dtype

    def copy(
        self,
        operands: Sequence[Tensor],
        shapes: Sequence[tf.TensorShape] | None = None,
        attributes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Tensor]:
        """Add it with other inputs, as ``Builder.copy`` does."""
        return self.partition.copy(
            self.operation, operands, shapes, attributes, **options
        )

    def on_towers(
        self,
        operands: Sequence[Tensor],
        *layouts: Layout,
        shapes: Sequence[Sequence[Any] | None] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Values:
        """Have each tower do it; return its N outputs.

        Args:
            operands: what each tower is given.
            *layouts: those of the outputs.
            shapes: those of the outputs on one device, as far as they are
                known.
            attributes: those that differ from one device's.
        """
        sizes = shapes or [None] * len(layouts)
        specs = []
        for traced, size, layout in zip(
            self.shapes, sizes, layouts, strict=True
        ):
            if size is not None:
                traced = traced.merge_with(static(size))
            specs.append(local_shape(traced, layout))
        outputs = self.copy(operands, specs, attributes)
        return [
            Value(layout, local, shape=None if size is None else tuple(size))
            for layout, local, size in zip(layouts, outputs, sizes, strict=True)
        ]

    def of_shape(
        self,
        inputs: Values,
        target: int,
        sizes: Sequence[Any],
        layout: Sharded,
    ) -> Values:
        """Have each tower make its rows of a shape that is given.

        Args:
            inputs: its inputs; of those that are sharded, each tower gives its
                rows as they are.
            target: which of them is the shape.
            sizes: the shape's entries, as far as they are known.
            layout: where the rows are to be.
        """
        partition = self.partition
        operands = [
            cast("Tensor", value.local)
            if value.sharded
            else partition.replicated(value)
            for value in inputs
        ]
        operands[target] = partition.local_target(inputs[target], sizes, layout)
        return self.on_towers(operands, layout, shapes=[sizes])


def rule(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a rule; of several for a type the first is asked first."""
    return _added_to(RULES, types)


def axes(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a function that names the axes that operations share."""
    return _set_in(AXES, types)


def shape_of(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a function that returns the shape of operations' outputs."""
    return _set_in(SHAPES, types)


def notes(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a function that notes what is known of outputs' entries.

    It takes the operation, and the values of its inputs and outputs.
    """
    return _added_to(NOTES, types)


def _added_to(
    functions: dict[str, list[Any]], types: Sequence[str]
) -> Callable[[FunctionT], FunctionT]:
    def add(function: FunctionT) -> FunctionT:
        for type_ in types:
            functions.setdefault(type_, []).append(function)
        return function

    return add


def _set_in(
    functions: dict[str, Any], types: Sequence[str]
) -> Callable[[FunctionT], FunctionT]:
    def add(function: FunctionT) -> FunctionT:
        functions.update(dict.fromkeys(types, function))
        return function

    return add
