"""The side effects of operations, and their order."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node

_READS = (
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarIsInitializedOp",
    "VariableShape",
)
# Operations that either fail or do nothing.
_CHECKS = ("Assert", "CheckNumericsV2")
_BY_REFERENCE = tuple(
    dtype.as_datatype_enum for dtype in (tf.resource, tf.variant)
)


# ---- effects -----------------------------------------------------------------


class Effect(enum.IntEnum):
    """The effect of an operation, from the weakest to the strongest.

    Attributes:
        NONE: none, or it reads variables.
        PER_PROCESS: every process has the same effect: a write to variables, or
            a new object that belongs to the process.
        EXTERNAL: an effect that must happen once: draws from a generator,
            output, calls of Python, and the use of tables, queues or files.
    """

    NONE = 0
    PER_PROCESS = 1
    EXTERNAL = 2


def effect_of(operation: Any) -> Effect:
    """Return the effect of an operation, including the functions it calls."""
    if not operation.op_def.is_stateful or operation.type in _READS:
        return Effect.NONE
    if any(a.type in _BY_REFERENCE for a in operation.op_def.output_arg):
        return Effect.PER_PROCESS
    graphs = called_graphs(operation)
    if None in graphs:
        return Effect.EXTERNAL
    if graphs:
        operations = [o for graph in graphs for o in graph.get_operations()]
        return max((effect_of(o) for o in operations), default=Effect.NONE)
    if operation.type in _CHECKS:
        return Effect.PER_PROCESS
    resources = [t for t in operation.inputs if t.dtype == tf.resource]
    only_variables = resources and all(is_variable(t) for t in resources)
    return Effect.PER_PROCESS if only_variables else Effect.EXTERNAL


def is_variable(handle: Any) -> bool:
    """Whether a tensor is the handle of a variable."""
    data = compat.get_resource_handle_data(handle)
    return data is not None and data.is_set


def written(operation: Any) -> list[int]:
    """Return the indices of inputs that are variables it may write."""
    _, writes = compat.resources_of(operation)
    return [
        index
        for index, tensor in enumerate(operation.inputs)
        if tensor.dtype == tf.resource
        and tensor in writes
        and is_variable(tensor)
    ]


def called_graphs(operation: Any) -> list[Any]:
    """The graphs of called functions; None for one that is unknown."""
    names = []
    if compat.op_definition(operation.type) is None:
        names.append(operation.type)
    for value in operation.node_def.attr.values():
        if value.HasField("func"):
            names.append(value.func.name)
        names += [function.name for function in value.list.func]
    graph = operation.graph
    return [compat.graph_of_function(graph, name) for name in names]


# ---- order -------------------------------------------------------------------


class ResourceOrder:
    """The times after which resources may be read and written.

    A time is twice the level, plus one for the operations of towers, as a level
    begins with the operations that are computed once.

    Attributes:
        copies: the common handles of mirrored variables, by the towers'
            handles.
    """

    def __init__(self) -> None:
        self.copies: dict[Tensor, Tensor] = {}
        self._ready: dict[Any, tuple[int, int]] = {}
        self._least = (0, 0)

    def earliest_level(
        self, node: Node, operands: Sequence[Tensor], reads: bool
    ) -> int:
        """Return the earliest level of an operation that uses resources.

        Args:
            node: the operation.
            operands: its inputs.
            reads: whether it only reads resources.
        """
        ready = [
            self._ready.get(key, self._least)
            for key in self._keys(node, operands)
        ]
        time = max(
            (times[0] if reads else times[1] for times in ready), default=0
        )
        return (time + 1 - tower_phase(operands)) // 2

    def record_use(
        self, node: Node, operands: Sequence[Tensor], reads: bool
    ) -> int:
        """Order later users of the same resources after an operation.

        Args:
            node: the operation.
            operands: its inputs.
            reads: whether it only reads resources.

        Returns:
            The earliest level of the operation.
        """
        least = self.earliest_level(node, operands, reads)
        level = max([least, *(tensor.level for tensor in operands)])
        time = 2 * level + tower_phase(operands)
        for key in self._keys(node, operands):
            to_read, to_write = self._ready.get(key, self._least)
            to_read = to_read if reads else max(to_read, time)
            self._ready[key] = to_read, max(to_write, time)
        return least

    def record_update(
        self, handles: list[Any] | None, operands: Sequence[Tensor]
    ) -> int:
        """Order an update of variables; return the level at whose end it is.

        Args:
            handles: the handles of the variables; None: it may use any
                variable.
            operands: the inputs of the update.
        """
        keys = list(self._ready) if handles is None else handles
        # After the operations of towers in the level, and after operations that
        # may fail: a step whose assertion fails updates nothing.
        before = [
            self._ready.get(key, self._least)[1] // 2 for key in (*keys, None)
        ]
        level = max(
            [*before, *(tensor.level for tensor in operands)], default=0
        )
        ready = 2 * (level + 1), 2 * (level + 1)
        self._ready.update(dict.fromkeys(keys, ready))
        if handles is None:
            self._least = ready
        return level

    def _keys(self, node: Node, operands: Sequence[Tensor]) -> list[Any]:
        """The resources of an operation; None: a resource without a handle."""
        keys: list[Any] = [
            self.copies.get(t, t) for t in operands if t.dtype == tf.resource
        ]
        is_stateful = node.operation.op_def.is_stateful
        return keys or ([None] if is_stateful else [])


def tower_phase(operands: Sequence[Tensor]) -> int:
    """Return 1 if towers run an operation, 0 if it is computed once.

    Within a level, what is computed once comes first.
    """
    return int(any(tensor.on_towers for tensor in operands))
