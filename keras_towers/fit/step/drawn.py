"""Whether a tower's step draws random numbers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context.tower import Tower

# An operation that has one of these as an input draws, or prepares a draw.
_INPUTS = {"seed", "alg", "algorithm"}


@contextlib.contextmanager
def noted(tower: Tower) -> Iterator[None]:
    """Note if the tower's step, which runs in this block, draws."""
    if tf.executing_eagerly():
        # No graph shows it, but ``draws`` does.
        yield
        return
    graph = compat.get_default_graph()
    begun = len(graph.get_operations())
    yield
    if _any_in(graph.get_operations()[begun:]):
        tower.note_alone("random", "random layers")


def _any_in(operations: Iterable[tf.Operation]) -> bool:
    """Whether operations, or the functions that they call, draw."""
    waiting, seen = [list(operations)], set()
    while waiting:
        inside = waiting.pop()
        if any(_draws(operation.type) for operation in inside):
            return True
        for graph in _called(inside):
            if id(graph) not in seen:
                seen.add(id(graph))
                waiting.append(graph.get_operations())
    return False


def _called(operations: Iterable[tf.Operation]) -> Iterator[Any]:
    """The graphs of the functions that operations call."""
    for operation in operations:
        for name in _function_names(operation):
            graph = compat.graph_of_function(operation.graph, name)
            if graph is not None:
                yield getattr(graph, "traced", graph)


def _function_names(operation: tf.Operation) -> Iterator[str]:
    attributes = _attributes_of_functions(operation.type)
    if attributes is None:
        # An unknown operation is a call of the function of that name.
        yield operation.type
    for attribute in attributes or ():
        value = operation.get_attr(attribute)
        for function in value if isinstance(value, list) else [value]:
            yield function.name


@functools.cache
def _attributes_of_functions(kind: str) -> list[str] | None:
    definition = compat.op_definition(kind)
    if definition is None:
        return None
    types = "func", "list(func)"
    return [attr.name for attr in definition.attr if attr.type in types]


@functools.cache
def _draws(kind: str) -> bool:
    """Whether operations of a kind draw random numbers, by their seeds."""
    definition = compat.op_definition(kind)
    if definition is None:
        return False
    attributes = {attr.name for attr in definition.attr}
    if "seed2" in attributes:
        # Those of cuDNN draw for their dropout only, which Keras leaves out.
        return "dropout" not in attributes
    return any(arg.name in _INPUTS for arg in definition.input_arg)
