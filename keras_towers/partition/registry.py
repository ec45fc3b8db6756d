"""The rules of operations by their types, and operations as rules see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import Shape, Values

# Takes the partitioner, the operation and the values of its inputs, and returns
# those of its outputs. What raises ``NotDivided`` does not fit: the next is
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
    """One operation of a traced graph."""

    def __init__(self, operation: Any):
        self.operation = operation
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

    It takes the partitioner, the operation and the values of its inputs and
    outputs.
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
