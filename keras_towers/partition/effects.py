"""What operations do besides computing their outputs."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_towers import compat

_READS = (
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarIsInitializedOp",
    "VariableShape",
)
# They fail, or do nothing.
_CHECKS = ("Assert", "CheckNumericsV2")
_BY_REFERENCE = tuple(
    dtype.as_datatype_enum for dtype in (tf.resource, tf.variant)
)


class Effect(enum.IntEnum):
    """What an operation does, the strongest last.

    Attributes:
        NONE: nothing, or it reads variables.
        ALIKE: what every process does with the same result: it writes
            variables, or makes what belongs to a process.
        OUTSIDE: what is to happen once: it draws, prints, calls Python, or uses
            tables, queues or files.
    """

    NONE = 0
    ALIKE = 1
    OUTSIDE = 2


def effect_of(operation: Any) -> Effect:
    """Return what an operation does, with the functions that it calls."""
    if not operation.op_def.is_stateful or operation.type in _READS:
        return Effect.NONE
    if any(a.type in _BY_REFERENCE for a in operation.op_def.output_arg):
        return Effect.ALIKE
    names = list(_functions(operation))
    if names:
        graphs = [
            compat.graph_of_function(operation.graph, name) for name in names
        ]
        if None in graphs:
            return Effect.OUTSIDE
        every = [o for graph in graphs for o in graph.get_operations()]
        return max((effect_of(o) for o in every), default=Effect.NONE)
    if operation.type in _CHECKS:
        return Effect.ALIKE
    resources = [t for t in operation.inputs if t.dtype == tf.resource]
    only_variables = resources and all(is_variable(t) for t in resources)
    return Effect.ALIKE if only_variables else Effect.OUTSIDE


def is_variable(handle: Any) -> bool:
    """Whether a tensor is the handle of a variable."""
    data = compat.get_resource_handle_data(handle)
    return data is not None and data.is_set


def variable_spec(handle: Any) -> tuple[Any, tf.TensorShape]:
    """Return the dtype and the shape of a variable."""
    (spec,) = compat.get_resource_handle_data(handle).shape_and_type
    return tf.as_dtype(spec.dtype), tf.TensorShape(spec.shape)


def written(operation: Any) -> list[int]:
    """Return which inputs are handles of variables that it may write."""
    _, writes = compat.resources_of(operation)
    return [
        index
        for index, tensor in enumerate(operation.inputs)
        if tensor.dtype == tf.resource
        and tensor in writes
        and is_variable(tensor)
    ]


def _functions(operation: Any) -> Iterator[str]:
    """The names of the functions that an operation calls."""
    if compat.op_definition(operation.type) is None:
        yield operation.type
    for value in operation.node_def.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for function in value.list.func:
            yield function.name
