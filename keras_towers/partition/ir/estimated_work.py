"""Estimates the work of an operation from the sizes of its tensors.

The choice of a layout, the schedule and reports on costs compare operations by
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.effects import LOOPS, called_graphs
from keras_towers.partition.ir.registry import facts_of
from keras_towers.partition.ir.sizes import ASSUMED_LENGTH

# The multiplications in the time of which memory moves a byte.
_PER_BYTE = 4
_NO_NUMBERS = (tf.resource, tf.string, tf.variant)


def estimated_work(operation: Any, entries: Callable[[Any], int]) -> float:
    """Estimate how long an operation takes, as a number of multiplications.

    Most operations wait for memory: while a CPU or a GPU moves a byte, it can
    multiply a few numbers. So the bytes of all inputs and outputs count, and
    the multiplications of products, such as of matrices.

    Args:
        operation: one of a graph or of a program; it calls no function.
        entries: returns how many entries a tensor has.
    """
    facts, result = facts_of(operation.type), operation.outputs[0]
    work, inputs = facts.work, operation.inputs
    if facts.memory == "input":
        return 0
    # Of a table, only what is picked is read.
    read = operation.outputs if work == "picked" else inputs
    moved = [*operation.outputs, *read]
    waits = _PER_BYTE * sum(
        entries(tensor) * tensor.dtype.size
        for tensor in moved
        if tensor.dtype not in _NO_NUMBERS
    )
    made = entries(result)
    if work == "convolution":
        # At each place as often as the filter has entries. What is not given is
        # computed: the image, or the gradient of the filter.
        arguments = compat.op_definition(operation.type).input_arg
        names = [argument.name for argument in arguments]
        given = dict(zip(names, inputs, strict=True))
        image = given.get("out_backprop", result)
        axis = 1 if _data_format(operation).startswith(b"NC") else -1
        places = entries(image) / (image.shape[axis] or 1)
        return waits + entries(given.get("filter", result)) * places
    if work in ("product", "products"):
        # Of shapes [m, k], [k, n] and [m, n]: m k n.
        together = math.prod(sorted(map(entries, inputs))[-2:]) * made
        if work == "products" and result.shape.rank is not None:
            # The axes of the batch are in all three.
            together *= math.prod(n or 1 for n in result.shape[-2:]) / made
        return waits + math.sqrt(together)
    return waits + made * facts.entry_work


def _data_format(operation: Any) -> bytes:
    """Return where a convolution's channels are."""
    is_traced = isinstance(operation, tf.Operation)
    found = operation.node_def.attr if is_traced else operation.attributes
    return found["data_format"].s


def work_of(operation: tf.Operation) -> float:
    """Estimate the work of a traced operation; at least 1.

    It includes called functions: all branches, and all rounds of a loop.
    """
    graphs = [graph for graph in called_graphs(operation) if graph is not None]
    if graphs:
        inside = [o for graph in graphs for o in graph.get_operations()]
        return max(1, rounds_of(operation) * sum(map(work_of, inside)))
    if not operation.outputs or not operation.inputs:
        return 1
    return max(1, estimated_work(operation, _entries))


def _entries(tensor: tf.Tensor) -> int:
    """Return the number of entries of a tensor, for an assumed length."""
    if tensor.shape.rank is None:
        return 1
    return math.prod(
        ASSUMED_LENGTH if size is None else size for size in tensor.shape
    )


def rounds_of(operation: tf.Operation) -> int:
    """Return the number of rounds of a loop if a limit is known, else 1."""
    if operation.type not in LOOPS:
        return 1
    name = operation.get_attr("cond").name
    condition = compat.graph_of_function(operation.graph, name)
    if condition is None:
        return ASSUMED_LENGTH
    given = {
        inside.name: outside
        for inside, outside in zip(
            condition.inputs, operation.inputs, strict=True
        )
    }
    limits = []
    for compared in condition.get_operations():
        if compared.type == "Less":
            limit = compared.inputs[1]
            limit = given.get(limit.name, limit)
            if limit.op.type in LOOPS:
                # The backward pass has as many rounds as the forward pass.
                limits.append(rounds_of(limit.op))
            else:
                limits.append(tf.get_static_value(limit))
    known = [int(number) for number in limits if number is not None]
    return min(known, default=ASSUMED_LENGTH)
