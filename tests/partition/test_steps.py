"""Whole training steps: what one device does, divided over four towers.

Of each last batch three towers have no examples. `make test` draws some of the
steps by a seed; `make test-all` has all of them.
"""

import contextlib

import pytest

from tests.kit.compare import differences
from tests.kit.sampling import sample_of
from tests.partition.cases import CASES
from tests.partition.computed_once import ONCE, computed_once
from tests.partition.steps import fit, on_towers, used

DRAWN = 15
_WAYS = [(name, way) for name in CASES for way in ("once", "each")]


@pytest.mark.parametrize(("name", "updates"), sample_of(_WAYS, DRAWN))
def test_a_step_is_that_of_one_device(name, updates):
    case, programs = CASES[name], []
    one = used(case, contextlib.nullcontext(), fit)
    many = used(case, on_towers(programs, updates=updates), fit)
    assert not differences(many, one)
    # Programs are too large for pytest to show.
    once = computed_once(programs)
    assert once == ONCE.get(name, "")
