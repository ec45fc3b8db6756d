"""Operations as rules see them, and the rules of each type of operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from keras_towers.partition.division import Factors
from keras_towers.partition.layouts import (
    Layout,
    Shape,
    Sharded,
    Value,
    Values,
    local_shape,
    require,
    sizes_of,
    static,
    unless_none,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import UNKNOWN

if TYPE_CHECKING:
    from keras_towers.partition.partitioner import Partitioner

# A rule takes a node and the values of its inputs, and returns the values of
# its outputs. If it raises ``NotDivided``, the next rule of the type is tried,
# then its axes. If these fail, too, the operation is computed once.
Rule: TypeAlias = "Callable[..., Values]"
# Takes a node and the values of its inputs, whose ranks are known.
Axes: TypeAlias = "Callable[..., Factors]"
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

RULES: dict[str, list[Rule]] = {}
AXES: dict[str, Axes] = {}
# Functions that return the global shape of all outputs.
SHAPES: dict[str, Callable[..., Shape]] = {}
# Functions that note facts about the entries of the outputs.
NOTES: dict[str, list[Callable[..., None]]] = {}


class Node:
    """An operation of the traced graph that is being laid out.

    Attributes:
        operation: the operation.
        partitioner: the partitioner of the graph, which adds operations.
        type: the type of the operation.
    """

    def __init__(self, operation: Any, partitioner: Partitioner):
        self.operation = operation
        self.partitioner = partitioner
        self.type: str = operation.type

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return len(self.operation.outputs)

    @property
    def shapes(self) -> list[tf.TensorShape]:
        """The traced shapes of the outputs."""
        return [tensor.shape for tensor in self.operation.outputs]

    @property
    def must_be_compiled(self) -> bool:
        """Whether it calls a function that XLA compiles apart from the rest."""
        if not self.type.endswith("PartitionedCall"):
            return False
        with_rest = self.partitioner.options.xla
        attributes = self.operation.node_def.attr
        return not with_rest and attributes["_XlaMustCompile"].b

    def attr(self, name: str) -> Any:
        """Return an attribute."""
        return self.operation.get_attr(name)

    def dtype(self, index: int) -> tf.DType:
        """Return the dtype of an input."""
        return self.operation.inputs[index].dtype

    def output_dtype(self, index: int = 0) -> tf.DType:
        """Return the dtype of an output."""
        return self.operation.outputs[index].dtype

    def requested_shape(self, target: Value) -> Shape:
        """Return the shape of the output, which is also an input.

        Args:
            target: the input that is the shape.

        Raises:
            NotDivided: its rank is unknown.
        """
        require(self.shapes[0].rank is not None)
        traced = sizes_of(self.shapes[0])
        if target.known is None:
            return traced
        return tuple(
            size if known is UNKNOWN or known == -1 else known
            for known, size in zip(np.ravel(target.known), traced, strict=True)
        )

    def copy(
        self,
        operands: Sequence[Tensor],
        shapes: Sequence[tf.TensorShape] | None = None,
        attributes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Tensor]:
        """Add the operation with other inputs, as ``Builder.copy`` does."""
        return self.partitioner.copy(
            self.operation, operands, shapes, attributes, **options
        )

    def run_on_towers(
        self,
        operands: Sequence[Tensor],
        *layouts: Layout,
        shapes: Sequence[Sequence[Any] | None] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Values:
        """Run the operation on every tower; return its N outputs.

        Args:
            operands: the local inputs.
            *layouts: the layouts of the N outputs.
            shapes: the global shapes of the N outputs; None: as traced.
            attributes: the attributes that differ from the trace.
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

    def run_with_shape(
        self, inputs: Values, target: int, sizes: Sequence[Any], layout: Sharded
    ) -> Values:
        """Run an operation that takes a shape on every tower.

        Args:
            inputs: its inputs. The sharded ones are passed on as local rows.
            target: the index of the input that is the shape.
            sizes: the entries of the global shape.
            layout: the layout of the output.
        """
        partitioner = self.partitioner
        operands = [
            unless_none(value.local)
            if value.sharded
            else partitioner.replicate(value)
            for value in inputs
        ]
        operands[target] = partitioner.local_target(
            inputs[target], sizes, layout
        )
        return self.run_on_towers(operands, layout, shapes=[sizes])


def rule(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a rule. The rules of a type are tried in this order."""
    return _added_to(RULES, types)


def axes(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a function that names the shared axes of operations."""
    return _set_in(AXES, types)


def shape_of(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a function that returns the shape of the outputs."""
    return _set_in(SHAPES, types)


def notes(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a function that notes facts about the entries of outputs.

    It takes a node and the values of its inputs and outputs.
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
