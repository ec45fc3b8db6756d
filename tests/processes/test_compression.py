"""How gradients travel, between two real processes."""

import pytest

from tests.processes.checks import names

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", names("compression"))
def test_two_ranks(run_checks, name):
    run_checks("compression", 2, name, (), limit_s=180)
