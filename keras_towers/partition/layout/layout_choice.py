"""Choice between two layouts of a step by their estimated cost.

The size of an axis does not say whether it counts examples. A step may draw as
many random numbers as a batch has examples because it needs one for each, as a
generator of images does, or by coincidence, for a weight of that length. The
same holds for what is computed once from all rows, such as a factor of a
matrix. A layout without rows is right in both cases. ``traced_graph.py``
also lays the step out with rows there, and the cheaper program wins.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from keras_towers.partition.ir.effects import is_draw
from keras_towers.partition.ir.estimated_work import work_of
from keras_towers.partition.ir.program import Program
from keras_towers.partition.ir.sizes import ASSUMED_LENGTH
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.layout.units import Units

# The exchange of a byte takes about as long as so many multiplications.
_WORK_PER_BYTE = 100


def has_other_layout(program: Program, units: Units) -> bool:
    """Whether an undivided axis has as many entries as there are examples.

    Only random draws, and operations that are computed once, count.
    """
    size = units.of_batch.size
    if not isinstance(size, int) or size < 2:
        return False
    return any(
        units.find_rows(0, length or 0, may_coincide=True)
        for source in _undivided(program)
        if is_draw(source.type) or source in program.computed_once
        for output in source.outputs
        for length in (output.shape if output.shape.rank else ())
    )


def cheaper(program: Program, other: Program) -> Program:
    """Return the cheaper of two programs; the first one if they cost the same.

    Only what more towers do not make cheaper counts: undivided operations and
    the bytes of exchanges.
    """
    return min(program, other, key=_cost_of)


def _cost_of(program: Program) -> float:
    """Return the cost of a program, in multiplications."""
    work = sum(map(work_of, _undivided(program)))
    sizes = TensorSizes(program, towers=1, rows=ASSUMED_LENGTH)
    moved = sum(sizes.bytes_of(e.result) for e in program.exchanges)
    return work + _WORK_PER_BYTE * moved


def _undivided(program: Program) -> Iterable[tf.Operation]:
    """Return the traced operations that are computed once, as on one device."""
    undivided = {
        id(operation.source): operation.source
        for operation in program.operations
        if operation.source is not None
        and "micro_batches" not in operation.axes
    }
    return undivided.values()
