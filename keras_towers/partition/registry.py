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
# Types whose rules are asked even if no input is divided: they create rows.
ALWAYS: set[str] = set()
OF_LISTS: set[str] = set()
# Rules that are asked first if an input holds indices of rows.
BY_PLACES: dict[str, Rule] = {}
# Functions that tell which axis the integers index that operations return.
NUMBERS: dict[str, list[Callable[..., None]]] = {}
# Functions that return shapes of outputs that the trace does not know.
SHAPES: dict[str, Callable[..., Sequence[Shape | None]]] = {}


def axes(*types: str) -> Callable[[AxesT], AxesT]:
    """Register a function that names the axes that operations share.

    It takes the operation and the values of its inputs, and returns
    ``Factors``, or None if the operation cannot be divided.
    """

    def add(function: AxesT) -> AxesT:
        AXES.update(dict.fromkeys(types, function))
        return function

    return add


def rule(
    *types: str, always: bool = False, of_lists: bool = False
) -> Callable[[RuleT], RuleT]:
    """Register a rule for operations that axes do not describe.

    Args:
        types: the types of operations.
        always: whether the rule is asked if no input is divided, too.
        of_lists: whether it divides lists.
    """

    def add(function: RuleT) -> RuleT:
        RULES.update(dict.fromkeys(types, function))
        ALWAYS.update(types if always else ())
        OF_LISTS.update(types if of_lists else ())
        return function

    return add


def by_places(*types: str) -> Callable[[RuleT], RuleT]:
    """Register a rule for operations with indices of rows as an input."""

    def add(function: RuleT) -> RuleT:
        BY_PLACES.update(dict.fromkeys(types, function))
        return function

    return add


def numbers_of(
    *types: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function that tells which axis an output's integers index.

    It takes the partitioner, the operation and the values of its inputs and
    outputs, and notes the axis on these.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for type_ in types:
            NUMBERS.setdefault(type_, []).append(function)
        return function

    return add


def shape_of(*types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that returns the shape of operations' outputs."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def shapes(node: Node, *inputs: Value) -> Sequence[Shape | None]:
            return [function(node, *inputs)] * node.num_outputs

        SHAPES.update(dict.fromkeys(types, shapes))
        return function

    return add
