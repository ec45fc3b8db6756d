"""The side effects of operations, such as writes, prints and draws.

``undivided.py`` computes an operation with an effect once, for all towers.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.program import Attributes
from keras_towers.partition.ir.registry import facts_of

# Types of loops, which return the handles that they take.
LOOPS = ("While", "StatelessWhile")
_BY_REFERENCE = tuple(
    dtype.as_datatype_enum for dtype in (tf.resource, tf.variant)
)


# Inputs that draws have; others are called ``alg``, ``key`` or ``shape``.
_RANDOM_STATES = {"counter", "seed"}


class Effect(enum.IntEnum):
    """The effect of an operation, from the weakest to the strongest.

    Attributes:
        NONE: none, or it reads variables.
        CHECK: it either fails or does nothing.
        PER_PROCESS: every process has the same effect: a write to variables or
            tables, or a new object that belongs to the process.
        EXTERNAL: an effect that must happen once: draws from a generator,
            output, calls of Python, reads of tables that may change, and the
            use of queues or files.
    """

    NONE = 0
    CHECK = 1
    PER_PROCESS = 2
    EXTERNAL = 3


_EFFECTS = {
    "reads": Effect.NONE,
    "checks": Effect.CHECK,
    "writes": Effect.PER_PROCESS,
    "once": Effect.EXTERNAL,
}


def effect_of(operation: tf.Operation) -> Effect:
    """Return the effect of an operation, including the functions it calls."""
    known = facts_of(operation.type).effect
    if known is not None:
        return _EFFECTS[known]
    if not operation.op_def.is_stateful:
        return Effect.NONE
    if any(a.type in _BY_REFERENCE for a in operation.op_def.output_arg):
        return Effect.PER_PROCESS
    graphs = called_graphs(operation)
    if None in graphs:
        return Effect.EXTERNAL
    if graphs:
        operations = [o for graph in graphs for o in graph.get_operations()]
        return max((effect_of(o) for o in operations), default=Effect.NONE)
    resources = [t for t in operation.inputs if t.dtype == tf.resource]
    only_variables = resources and all(is_variable(t) for t in resources)
    return Effect.PER_PROCESS if only_variables else Effect.EXTERNAL


@functools.cache
def is_draw(type_: str) -> bool:
    """Whether operations of a type draw random numbers from a seed input.

    XLA draws other numbers than TensorFlow.
    """
    definition = compat.op_definition(type_)
    if definition is None:
        return False
    return any(a.name in _RANDOM_STATES for a in definition.input_arg)


def draws_statefully(type_: str) -> bool:
    """Whether operations of a type draw from TensorFlow's own generator."""
    definition = compat.op_definition(type_)
    return definition is not None and (
        definition.is_stateful
        and {"seed", "seed2"} <= {a.name for a in definition.attr}
    )


def changes_state(graph: tf.Graph) -> tf.Operation | None:
    """Return an operation that draws statefully or writes a variable, if any.

    It may be in a function that the graph calls.
    """
    for operation in graph.get_operations():
        if draws_statefully(operation.type) or written(operation):
            return operation
        for called in filter(None, called_graphs(operation)):
            found = changes_state(called)
            if found is not None:
                return found
    return None


def is_variable(handle: tf.Tensor) -> bool:
    """Whether a tensor is the handle of a variable."""
    data = compat.get_resource_handle_data(handle)
    return data is not None and data.is_set


def written(operation: tf.Operation) -> list[int]:
    """Return the indices of the inputs that are variables it may write."""
    _, writes = compat.resources_of(operation)
    return [
        index
        for index, tensor in enumerate(operation.inputs)
        if tensor.dtype == tf.resource
        and tensor in writes
        and is_variable(tensor)
    ]


def called_names(attributes: Attributes) -> list[str]:
    """Return the names of the functions that a node calls."""
    names: list[str] = []
    for value in attributes.values():
        if value.HasField("func"):
            names.append(value.func.name)
        names += [function.name for function in value.list.func]
    return names


def called_graphs(operation: tf.Operation) -> list[Any]:
    """Return the graphs of called functions; None for an unknown one."""
    names = called_names(operation.node_def.attr)
    if compat.op_definition(operation.type) is None:
        names.append(operation.type)
    graph = operation.graph
    return [compat.graph_of_function(graph, name) for name in names]
