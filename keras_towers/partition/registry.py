"""The rules of operations, by their types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import Shape, Value
from keras_towers.partition.node import Node

# Takes the partitioner, the operation and the values of its inputs, and returns
# those of its outputs; None: it is computed once.
Rule: TypeAlias = "Callable[..., list[Value] | None]"
RuleT = TypeVar("RuleT", bound=Rule)
# Takes the operation and the values of its inputs, and returns its axes.
Axes: TypeAlias = "Callable[..., Factors | None]"
AxesT = TypeVar("AxesT", bound=Axes)

AXES: dict[str, Axes] = {}
RULES: dict[str, Rule] = {}
# Asked even if all inputs are the same for all: what makes rows of nothing.
ALWAYS: set[str] = set()
OF_LISTS: set[str] = set()
# What gives the shapes of outputs, where the trace does not know them.
SHAPES: dict[str, Callable[..., Sequence[Shape | None]]] = {}


def axes(*types: str) -> Callable[[AxesT], AxesT]:
    """Register what says which axes of operations are the same.

    It takes the operation and the values of its inputs, and returns them; None:
    the operation cannot be divided.
    """

    def add(function: AxesT) -> AxesT:
        AXES.update(dict.fromkeys(types, function))
        return function

    return add


def rule(
    *types: str, always: bool = False, of_lists: bool = False
) -> Callable[[RuleT], RuleT]:
    """Register what lays out operations, where axes do not say it all.

    Args:
        types: the types of operations.
        always: whether it is asked if nothing is divided, too.
        of_lists: whether they divide lists.
    """

    def add(function: RuleT) -> RuleT:
        RULES.update(dict.fromkeys(types, function))
        ALWAYS.update(types if always else ())
        OF_LISTS.update(types if of_lists else ())
        return function

    return add


def shape_of(*types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what gives the shape of operations' outputs."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def shapes(node: Node, *inputs: Value) -> Sequence[Shape | None]:
            return [function(node, *inputs)] * node.num_outputs

        SHAPES.update(dict.fromkeys(types, shapes))
        return function

    return add
