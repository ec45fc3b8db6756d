"""Whether an axis is of examples, if only its size says so.

As many random numbers as a batch has examples may be drawn for these, as those
from which a generator makes images, or by coincidence for a weight that is as
long. What is computed once from all rows, such as a factor of a matrix, may
have rows or be as long. A layout without rows is right for all. The other
reading is tried as well, and the cheaper program wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import tensorflow as tf

from keras_towers.partition.effects import is_draw
from keras_towers.partition.estimated_work import ASSUMED_LENGTH, work_of
from keras_towers.partition.program import Exchange, Program
from keras_towers.partition.units import Units

# How many multiplications take as long as the exchange of a byte, about.
_WORK_PER_BYTE = 10


def may_have_rows(program: Program, units: Units) -> bool:
    """Whether draws, or what is computed once, may have undivided examples."""
    size = units.of_batch.size
    if not isinstance(size, int) or size < 2:
        return False
    return any(
        units.find_rows(0, length or 0, by_number=True)
        for source in _undivided(program)
        if is_draw(source.type) or source in program.computed_once
        for output in source.outputs
        for length in (output.shape if output.shape.rank else ())
    )


def cost_of(program: Program) -> float:
    """Return what a program costs that more towers do not make cheaper."""
    work = sum(map(work_of, _undivided(program)))
    return work + _WORK_PER_BYTE * sum(map(_bytes, program.exchanges))


def _undivided(program: Program) -> Iterable[tf.Operation]:
    """Return the traced operations that are computed as one device does."""
    found = {
        id(operation.source): operation.source
        for operation in program.operations
        if operation.source is not None and "parts" not in operation.axes
    }
    return found.values()


def _bytes(exchange: Exchange) -> int:
    """Return about how many bytes an exchange moves."""
    sizes = exchange.sizes
    if sizes is None:
        sizes = exchange.given.shape if exchange.given.shape.rank else ()
    lengths = (s if isinstance(s, int) else ASSUMED_LENGTH for s in sizes)
    return math.prod(lengths, start=exchange.given.dtype.size)
