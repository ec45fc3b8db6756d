"""Every operation: how towers have its results, and that these are right.

The list of layouts has a line for each operation: what towers have if their
rows are along the axis of a letter, and if an input is a sum. Of comparisons
with one device, on random layouts, `make test` draws some by a seed; `make
test-all` has all.
"""

import dataclasses
import zlib

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition.ir.layouts import PARTIAL, REPLICATED, Sharded
from tests.kit.sampling import sample_of
from tests.partition.kit import (
    TOWERS,
    Input,
    OneDeviceFails,
    check_on_towers,
    laid_out,
)
from tests.partition.layout.rules.cases import (
    elementwise,
    images,
    matrices,
    moves,
    parts,
    picks,
    reductions,
    shapes,
)
from tests.partition.layout.rules.cases.case import SIZES, draw_broadcast_axes
from tests.partition.layout_list import Section, described, is_of_this_version

DRAWN = 30
_FAMILIES = (elementwise, images, matrices, moves, parts, picks)
CASES = [
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


def line_of(case):
    """What towers have of an operation's results."""
    found = [case.name]
    for letter in _letters(case):
        given = _with_sums(_drawn(case, letter, True))
        found.append(
            f"{letter}: {described(laid_out(_compared(case), *given))}"
        )
    for number, arg in enumerate(case.args):
        if arg.dtype not in ("bool", "string"):
            given = _with_sums(_drawn(case, "", True), number)
            words = described(laid_out(_compared(case), *given))
            found.append(f"sum {number}: {words}")
    return "; ".join(found)


def _with_sums(given, *numbers):
    """Inputs of which only some are sums."""
    return [
        g
        if isinstance(g.layout, Sharded)
        else dataclasses.replace(
            g, layout=PARTIAL if number in numbers else REPLICATED
        )
        for number, g in enumerate(given)
    ]


LISTED = Section("operations", CASES, line_of)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_towers_have_the_layouts_that_are_listed(number):
    if not is_of_this_version():
        pytest.skip("another version traces steps otherwise")
    assert line_of(CASES[number]) == LISTED.listed[number]


@pytest.mark.alternate
@pytest.mark.parametrize("case", sample_of(CASES, DRAWN), ids=str)
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
