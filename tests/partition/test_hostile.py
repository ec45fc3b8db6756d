"""Steps in the style of examples and research code, laid out over towers.

`make test` draws some of them by a seed; `make test-all` has all of them.
"""

import contextlib

import pytest

from tests.kit.long import some_of
from tests.partition.hostile import STEPS
from tests.partition.steps import laid_out
from tests.splitting.trial import TOLERANCE, between, trained

DRAWN = 20


_WAYS = [(name, mirrored) for name in STEPS for mirrored in (False, True)]


@pytest.mark.parametrize(("name", "mirrored"), some_of(_WAYS, DRAWN))
def test_a_step_as_users_write_it(name, mirrored):
    step, made = STEPS[name], []
    one = trained(step, contextlib.nullcontext())
    many = trained(step, laid_out(made, mirrored))
    assert made
    assert one.keys() == many.keys()
    off = {key: between(one[key], many[key]) for key in one}
    assert max(off.values()) <= TOLERANCE, off
