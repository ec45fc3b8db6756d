"""Cases that repeat what others show, or of which `make test` draws some."""

import datetime
import os
import random

import pytest

SEEDED_BY = "KERAS_TOWERS_TEST_SEED"
# Every day draws other cases. In the environment, so that all processes of
# pytest-xdist draw the same ones, also at midnight.
os.environ.setdefault(SEEDED_BY, datetime.date.today().strftime("%Y%m%d"))
SEED = int(os.environ[SEEDED_BY])


def long_unless(kept, cases):
    """Mark all cases as long but for those that `make test` is to run, too.

    Args:
        kept: whether a case is run by `make test`.
        cases: of ``pytest.mark.parametrize``.
    """
    return [case if kept(case) else _long(case) for case in cases]


def sample_of(cases, part=2):
    """Mark all cases as long but for some that a seed draws.

    Args:
        cases: of ``pytest.mark.parametrize``.
        part: one of so many is run by `make test`.
    """
    cases = list(cases)
    drawn = _draw(len(cases), part)
    return [
        case if number in drawn else _long(case)
        for number, case in enumerate(cases)
    ]


def in_turn(turn, days=2):
    """A mark: `make test` runs the test on one of so many days.

    For what takes long to show one thing, that others show by and large. Those
    with other turns run on the other days, so that no day takes much longer.

    Args:
        turn: on which of the days: 0 to days - 1.
    """
    assert turn in range(days)
    today = SEED % days == turn
    return lambda test: test if today else pytest.mark.long(test)


def draw(names, part=2):
    """Return those of some names that a seed draws, and the others."""
    drawn = _draw(len(names), part)
    return (
        [name for number, name in enumerate(names) if number in drawn],
        [name for number, name in enumerate(names) if number not in drawn],
    )


def _draw(count, part):
    return random.Random(SEED).sample(range(count), -(-count // part))


def _long(case):
    values, given = (case if isinstance(case, tuple) else (case,)), {}
    if hasattr(case, "marks"):
        values, given = case.values, {"id": case.id}
    marks = [*getattr(case, "marks", ()), pytest.mark.long]
    return pytest.param(*values, **given, marks=marks)
