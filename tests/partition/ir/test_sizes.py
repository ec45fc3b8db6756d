"""Sizes in terms of the number of examples."""

from __future__ import annotations

import itertools
import operator

import pytest

from keras_towers.partition.ir.sizes import (
    EXAMPLES,
    UNKNOWN,
    Size,
    compared,
    symbol,
)

_LENGTH = symbol("length")
_SIZES = [
    *(0, 1, 2, -3, 7, EXAMPLES, 2 * EXAMPLES, -EXAMPLES, EXAMPLES * EXAMPLES),
    *(3 * _LENGTH, EXAMPLES * _LENGTH, UNKNOWN),
    *(EXAMPLES + 1, EXAMPLES + 1 + 1, 3 * (_LENGTH + 1)),
]
_OPERATORS = [operator.add, operator.sub, operator.mul, operator.floordiv]
_COMPARISONS = [
    *(operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.eq, operator.ne),
]


def _number(size, examples, length):
    if not isinstance(size, Size):
        return size
    powers = {"n": examples, "length": length}
    number = size.number
    for name, power in size.powers:
        more = name.count("+1")
        number *= (powers[name.removesuffix(more * "+1")] + more) ** power
    return number


@pytest.mark.parametrize("compute", [*_OPERATORS, operator.mod])
def test_arithmetic_is_exact_or_not_known(compute):
    for a, b in itertools.product(_SIZES, _SIZES):
        if not isinstance(b, Size) and b in (0, UNKNOWN):
            continue
        said = compute(a, b)
        if said is UNKNOWN:
            continue
        for examples, length in ((7, 3), (8, 5), (1, 1), (2, 7)):
            actual = compute(
                _number(a, examples, length), _number(b, examples, length)
            )
            assert _number(said, examples, length) == actual, (a, b, said)


@pytest.mark.parametrize("compare", _COMPARISONS)
def test_comparisons_are_true_of_all_numbers(compare):
    for a, b in itertools.product(_SIZES, _SIZES):
        said = compared(compare, a, b)
        if said is UNKNOWN:
            continue
        for examples, length in itertools.product((0, 1, 2, 7, 8), (0, 1, 7)):
            actual = compare(
                _number(a, examples, length), _number(b, examples, length)
            )
            assert said == actual, (a, b, said)


def test_sizes_below_zero_become_positive():
    assert abs(-3 * EXAMPLES) == abs(3 * EXAMPLES) == 3 * EXAMPLES


def test_comparisons_with_a_known_answer():
    assert compared(operator.ge, EXAMPLES, 0) is True
    assert compared(operator.gt, EXAMPLES, -1) is True
    assert compared(operator.eq, EXAMPLES, -1) is False
    assert compared(operator.eq, EXAMPLES, 1) is UNKNOWN
    # Of an empty batch both are 0.
    assert compared(operator.eq, 2 * EXAMPLES, EXAMPLES) is UNKNOWN
    assert compared(operator.gt, EXAMPLES, 0) is UNKNOWN
    assert (6 * EXAMPLES) // (2 * EXAMPLES) == 3
    assert EXAMPLES + 1 + 1 - 1 - 1 == EXAMPLES
    assert (EXAMPLES // 2) is UNKNOWN
    assert (EXAMPLES // 0) is UNKNOWN
    assert (-6 * EXAMPLES) // -2 == 3 * EXAMPLES
