"""Steps in the style of examples and research code, divided over towers.

`make test` draws some of them by a seed; `make test-all` has all of them.
"""

import contextlib

import pytest

from tests.kit.long import some_of
from tests.partition.computed_once import ONCE, computed_once
from tests.partition.hostile import STEPS
from tests.partition.steps import differences, on_towers, trained

DRAWN = 20
_WAYS = [(name, updates) for name in STEPS for updates in ("once", "each")]


@pytest.mark.parametrize(("name", "updates"), some_of(_WAYS, DRAWN))
def test_a_step_as_users_write_it(name, updates):
    step, programs = STEPS[name], []
    one = trained(step, contextlib.nullcontext())
    many = trained(step, on_towers(programs, updates=updates))
    assert not differences(one, many)
    # Programs are too large for pytest to show.
    once = computed_once(programs)
    assert once == ONCE.get(name, "")
