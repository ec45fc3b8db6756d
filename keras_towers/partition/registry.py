"""The rules of each type of operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from keras_towers.partition.division import Factors
from keras_towers.partition.layouts import Shape, Values

# A rule takes a node and the values of its inputs, and returns the values of
# its outputs. If it raises ``NotDivided``, the next rule of the type is tried,
# then its axes. If these fail, too, the operation is computed once.
Rule: TypeAlias = "Callable[..., Values]"
# Takes a node and the values of its inputs, whose ranks are known.
Axes: TypeAlias = "Callable[..., Factors]"
FunctionT = TypeVar("FunctionT", bound=Callable)

RULES: dict[str, list[Rule]] = {}
AXES: dict[str, Axes] = {}
# Operations of replicated inputs whose rows towers can compute by themselves:
# functions that take a node, the layout of the rows, and the values of its
# inputs, and return those of its outputs.
ROWS: dict[str, Rule] = {}
# Functions that return the global shape of all outputs.
SHAPES: dict[str, Callable[..., Shape]] = {}
# Functions that note facts about the entries of the outputs.
NOTES: dict[str, list[Callable[..., None]]] = {}


def rule(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a rule. The rules of a type are tried in this order."""
    return _added_to(RULES, types)


def axes(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a function that names the shared axes of operations."""
    return _set_in(AXES, types)


def rows_of(*types: str) -> Callable[[FunctionT], FunctionT]:
    """Register a function that computes the rows of a tower, and no others."""
    return _set_in(ROWS, types)


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
