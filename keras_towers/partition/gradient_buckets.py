"""Buckets of gradients, which towers exchange during the backward pass.

The backward pass is divided into levels. At the end of each level, towers
exchange a bucket of gradients, while they compute the next level. A level waits
for the end of the level two before it, and so for the updates with these
gradients. PyTorch's DistributedDataParallel has such buckets, too.
``schedule.py`` calls this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from keras_towers.partition.memory_estimate import events_of
from keras_towers.partition.program import (
    Exchange,
    Operation,
    Phase,
    Program,
    Tensor,
    depends_on_batch,
    level_after,
)
from keras_towers.partition.tensor_sizes import TensorSizes

# The bytes of gradients in a bucket, and the most buckets of a step.
_BUCKET_BYTES = 2**24
_MOST_BUCKETS = 24


def bucket_gradients(program: Program, sizes: TensorSizes) -> list[Operation]:
    """Divide the gradients of a program into buckets.

    Args:
        program: the program.
        sizes: the sizes of its tensors.

    Returns:
        The operations of the backward pass at which a level begins, at the end
        of which the next bucket is exchanged; none if gradients are few.
    """
    gradients = {e.given for e in program.exchanges if e.gradient}
    total = sum(map(sizes.bytes_of, gradients))
    bucket = max(_BUCKET_BYTES, total // _MOST_BUCKETS)
    if total < 2 * bucket:
        return []
    begins: list[Operation] = []
    filled = 0
    for event in events_of(program):
        if isinstance(event, Exchange):
            continue
        if _is_check(event):
            # A step whose assertion fails updates nothing.
            begins, filled = [], 0
        if not _is_of_pass(event):
            continue
        if filled >= bucket:
            begins.append(event)
            filled = 0
        given = gradients.intersection(event.outputs)
        filled += sum(map(sizes.bytes_of, given))
    return begins


def divide_levels(program: Program, begins: Iterable[Operation]) -> Program:
    """Begin new levels at operations of the forward or the backward pass.

    Args:
        program: the program; the levels of its operations are changed.
        begins: operations, at which the operations of a tower that follow begin
            another level.
    """
    first = {id(operation) for operation in begins}
    exchanges: list[Exchange] = []
    levels = _Levels(program)
    least = reached = 0
    for event in events_of(program):
        if isinstance(event, Exchange):
            # Inputs of towers are gathered late; other exchanges are free.
            later = (
                reached if event.least and "towers" in event.result.axes else 0
            )
            exchanges.append(dataclasses.replace(event, least=later))
            event.result.level = exchanges[-1].level + 1
            continue
        if id(event) in first:
            least = reached + 1
        is_of_pass = _is_of_pass(event)
        levels.place(event, least if is_of_pass else 0)
        if is_of_pass:
            reached = max(reached, event.level)
    return dataclasses.replace(program, exchanges=exchanges)


def _is_of_pass(operation: Operation) -> bool:
    """Whether an operation belongs to the forward or the backward pass.

    Towers compute it from rows of the batch.
    """
    is_of_towers = operation.phase is Phase.TOWERS
    return is_of_towers and depends_on_batch(operation.outputs)


def _is_check(operation: Operation) -> bool:
    """Whether an operation may fail, and writes no variable."""
    uses = any(tensor.dtype == tf.resource for tensor in operation.inputs)
    return operation.has_effect and not uses


class _Levels:
    """The levels of operations, which use resources in the order given."""

    def __init__(self, program: Program):
        inputs = program.inputs
        # A variable, and its copies on towers, are one resource.
        self._same: dict[Tensor, Tensor] = {
            copy: inputs.of_graph[index]
            for index, copy in inputs.copies.items()
        }
        self._used: dict[Tensor | None, tuple[int, Phase]] = {}

    def place(self, operation: Operation, least: int) -> None:
        """Place an operation on the earliest level that is possible."""
        phase = operation.phase
        used: list[Tensor | None] = [
            self._same.get(t, t)
            for t in operation.inputs
            if t.dtype == tf.resource
        ]
        if operation.has_effect and not used:
            used = [None]
        for key in used:
            level, last = self._used.get(key, (0, Phase.ONCE))
            least = max(least, level if phase >= last else level + 1)
        level = level_after(operation.inputs, phase, least)
        operation.level = level
        for tensor in operation.outputs:
            tensor.level = level
        self._used |= dict.fromkeys(used, (level, phase))
