"""Buckets of gradients, which towers exchange during the backward pass.

The backward pass is divided into levels. At the end of each level, towers
exchange a bucket of gradients, while they compute the next level. A level waits
for the end of the level two before it, and so for the updates with these
gradients. PyTorch's DistributedDataParallel has such buckets, too.
``schedule.py`` calls this file.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from keras_towers.partition.ir.program import (
    Event,
    Exchange,
    Operation,
    Phase,
    depends_on_batch,
)
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.gathers import gathers_variables
from keras_towers.partition.timeline.timeline import Levels, Timeline

# The bytes of gradients in a bucket, and the most buckets of a step.
_BUCKET_BYTES = 2**24
_MOST_BUCKETS = 24


def bucket_gradients(timeline: Timeline, sizes: TensorSizes) -> list[Operation]:
    """Divide the gradients of a program into buckets.

    Args:
        timeline: the timeline of the program.
        sizes: the sizes of its tensors.

    Returns:
        The operations of the backward pass at which a level begins, at the end
        of which the next bucket is exchanged; none if gradients are few.
    """
    exchanges = timeline.program.exchanges
    gradients = {e.given for e in exchanges if e.gradient}
    total = sum(map(sizes.bytes_of, gradients))
    bucket = max(_BUCKET_BYTES, total // _MOST_BUCKETS)
    if total < 2 * bucket:
        return []
    begins: list[Operation] = []
    filled = 0
    for event in timeline.events:
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


def divide_levels(timeline: Timeline, begins: Iterable[Event]) -> Timeline:
    """Begin new levels at operations of the forward or the backward pass.

    Args:
        timeline: the timeline.
        begins: operations, at which the operations of a tower that follow begin
            another level.
    """
    first, levels = {*begins}, Levels(timeline.program.before)
    least = reached = 0
    for event in timeline.program.events:
        if isinstance(event, Exchange):
            # Inputs of towers are gathered late; other exchanges are free.
            is_late = gathers_variables(event) and "towers" in event.result.axes
            levels.place(event, reached if is_late else 0)
            continue
        if event in first:
            least = reached + 1
        if event.is_repeated:
            continue
        if _is_of_pass(event):
            reached = max(reached, levels.place(event, least))
        else:
            levels.place(event)
    return timeline.reordered(timeline.program.events, levels.of_events)


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
