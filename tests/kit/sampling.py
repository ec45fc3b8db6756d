"""Cases that repeat what others show, or of which `make test` draws some."""

import os
import random
import zlib

import pytest

SEEDED_BY = "KERAS_TOWERS_TEST_SEED"
# A commit has the same tests everywhere, unless continuous integration names
# another seed: the number of a day, so that each day has its turn.
SEED = int(os.environ.get(SEEDED_BY, "1"))
# After so many days all that alternates has run.
DAYS = 6


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


def alternate(tests):
    """Leave those out of `make test` that are marked so, and of another turn.

    A seed is the number of a day. By default the tests of a file, and the cases
    of a test, have turns on six days: a sixth of them runs for each seed. The
    three Pythons of continuous integration have three seeds: on two days in
    turn, all of them run.

    Args:
        tests: pytest's items.
    """
    of_files = {}
    for test in tests:
        mark = test.get_closest_marker("alternate")
        if mark is None or test.get_closest_marker("core"):
            continue
        if test.module not in of_files:
            names = (n for n in vars(test.module) if n.startswith("test_"))
            of_files[test.module] = {name: n for n, name in enumerate(names)}
        turn = of_files[test.module].get(test.originalname, 0)
        if hasattr(test, "callspec"):
            # The same ones, whichever cases are asked for.
            turn += zlib.crc32(test.callspec.id.encode())
        turn = mark.kwargs.get("turn", turn)
        if (SEED - turn) % DAYS:
            test.add_marker(pytest.mark.long)


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
