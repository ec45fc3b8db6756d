"""Every operation, on random layouts, against one device.

`make test` draws some of them by a seed; `make test-all` has all.
"""

import dataclasses
import zlib

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition.layouts import PARTIAL, REPLICATED, Sharded
from tests.kit.sampling import sample_of
from tests.partition.kit import TOWERS, Input, OneDeviceFails, check_on_towers
from tests.partition.rules.cases import (
    elementwise,
    images,
    matrices,
    moves,
    parts,
    picks,
    reductions,
    shapes,
)
from tests.partition.rules.cases.case import SIZES, draw_broadcast_axes

pytestmark = pytest.mark.alternate

DRAWN = 30
_FAMILIES = (elementwise, images, matrices, moves, parts, picks)
_CASES = [
    case for family in (*_FAMILIES, reductions, shapes) for case in family.CASES
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
    if arg.dtype not in ("bool", "string"):
        share = 0.3 if axis else 0.7
        layout = PARTIAL if generator.random() < share else REPLICATED
    return Input(layout, tuple(sizes), **options)


def _drawn(case, letter, plain):
    """Draw layouts of which rows are along the axis of a letter, if any."""
    name = f"{case.name} {letter} {plain}"
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    every = [arg.axes for arg in case.args]
    if case.broadcast and not plain:
        every = draw_broadcast_axes(len(every), generator)
    number = 0 if plain else generator.integers(len(_PLACES))
    return [
        _given(arg, axes, letter, _PLACES[number], generator)
        for arg, axes in zip(case.args, every, strict=True)
    ]


def _of_known_size(case, letter):
    """Plain layouts, of as many examples as the letter has in ``SIZES``."""
    return [
        dataclasses.replace(given, examples=SIZES[letter])
        for given in _drawn(case, letter, True)
    ]


def _letters(case):
    return sorted({a for arg in case.args for a in arg.axes if a.islower()})


@pytest.mark.parametrize("case", sample_of(_CASES, DRAWN), ids=str)
def test_towers_compute_what_one_device_does(case):
    compared = 0
    for letter in ("", *_letters(case)):
        for plain in (True, False):
            given = _drawn(case, letter, plain)
            if all(g.layout == REPLICATED for g in given):
                continue
            compared += _check(case, given, TOWERS)
        if letter:
            towers = [(SIZES[letter] - 1, 0, 1)]
            compared += _check(case, _of_known_size(case, letter), towers)
    assert compared


def _check(case, given, towers):
    """Compare; return whether one device gives what can be compared."""
    try:
        check_on_towers(_compared(case), *given, towers=towers)
    except OneDeviceFails:
        return False
    return True


def _compared(case):
    """The function of a case, without outputs that TensorFlow leaves open."""
    if not case.name.startswith("FusedBatchNorm"):
        return case.function
    return lambda *given: tf.nest.flatten(case.function(*given))[0]
