"""Every operation, on random layouts, against one device."""

import contextlib
import zlib

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition.layouts import PARTIAL, REPLICATED, Sharded
from tests.partition.kit import TOWERS, Input, Refused, check
from tests.splitting.layouts import SIZES, broadcast
from tests.splitting.rules import (
    elementwise,
    images,
    lists,
    matrices,
    moves,
    parts,
    picks,
    reductions,
    shapes,
)

_FAMILIES = (elementwise, images, lists, matrices, moves, parts, picks)
_CASES = [
    case
    for family in (*_FAMILIES, reductions, shapes)
    for case in family.CASES
]
_PLACES = ((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 3))


def _given(arg, axes, axis, place, generator):
    options = {"dtype": arg.dtype, "low": arg.low, "high": arg.high}
    sizes = [SIZES[letter] for letter in axes]
    if axis and axis in axes:
        at = axes.index(axis)
        sizes[at] = -1
        return Input(Sharded(at, None, *place), tuple(sizes), **options)
    layout = REPLICATED
    if arg.dtype.startswith(("float", "complex")):
        layout = PARTIAL if generator.random() < 0.3 else REPLICATED
    return Input(layout, tuple(sizes), **options)


def _drawn(case, seed):
    generator = np.random.default_rng([zlib.crc32(case.name.encode()), seed])
    every = [arg.axes for arg in case.args]
    if case.broadcast and seed:
        every = broadcast(len(every), generator)
    letters = "".join(sorted({a for axes in every for a in axes} - {"1"}))
    axis = str(generator.choice([*letters])) if letters else ""
    place = _PLACES[generator.integers(len(_PLACES))] if seed else (1, 1)
    return [
        _given(arg, axes, axis, place, generator)
        for arg, axes in zip(case.args, every, strict=True)
    ]


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_towers_compute_what_one_device_does(case):
    for seed in range(3):
        given = _drawn(case, seed)
        if not any(isinstance(g.layout, Sharded) for g in given):
            continue
        # What TensorFlow itself refuses cannot be compared.
        with contextlib.suppress(Refused):
            check(_compared(case), *given, towers=TOWERS, seed=seed)


def _compared(case):
    """The function of a case, without outputs that TensorFlow leaves open."""
    if not case.name.startswith("FusedBatchNorm"):
        return case.function
    return lambda *given: tf.nest.flatten(case.function(*given))[0]
