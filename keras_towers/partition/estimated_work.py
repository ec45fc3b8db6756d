"""Estimates the work of an operation from the sizes of its tensors.

The choice of a layout, the schedule and reports on costs compare operations by
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.effects import LOOPS, called_graphs
from keras_towers.partition.registry import facts_of

# For an axis, or a loop, whose length the trace does not know.
ASSUMED_LENGTH = 64


def estimated_work(
    type_: str, inputs: Sequence[float], made: float, shape: tf.TensorShape
) -> float:
    """Estimate how many multiplications an operation takes.

    Products, such as of matrices, count their multiplications. Any other
    operation counts the entries of its outputs.

    Args:
        type_: the type of the operation.
        inputs: how many entries each of its N inputs has.
        made: how many entries it makes.
        shape: the shape of its first output.
    """
    kind = facts_of(type_).work
    if kind is None:
        return made
    # For shapes [m, k], [k, n] and [m, n] it is m k n.
    work = math.sqrt(math.prod(sorted(inputs)[-2:]) * made)
    if kind == "products" and shape.rank is not None:
        # The axes of the batch are in all three.
        batch = made
        for length in shape[-2:]:
            batch /= length or 1
        work /= math.sqrt(batch)
    return work


def work_of(operation: tf.Operation) -> float:
    """Estimate the work of a traced operation; at least 1.

    It includes called functions: all branches, and all rounds of a loop.
    """
    graphs = [graph for graph in called_graphs(operation) if graph is not None]
    if graphs:
        inside = [o for graph in graphs for o in graph.get_operations()]
        return max(1, _rounds_of(operation) * sum(map(work_of, inside)))
    made = sum(map(_entries, operation.outputs))
    if not made or not operation.inputs:
        return 1
    inputs, shape = map(_entries, operation.inputs), operation.outputs[0].shape
    return max(1, estimated_work(operation.type, list(inputs), made, shape))


def _entries(tensor: tf.Tensor) -> int:
    """Return the number of entries of a tensor, for an assumed length."""
    if tensor.shape.rank is None:
        return 1
    return math.prod(
        ASSUMED_LENGTH if size is None else size for size in tensor.shape
    )


def _rounds_of(operation: tf.Operation) -> int:
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
                limits.append(_rounds_of(limit.op))
            else:
                limits.append(tf.get_static_value(limit))
    known = [int(number) for number in limits if number is not None]
    return min(known, default=ASSUMED_LENGTH)
