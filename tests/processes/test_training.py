"""What users do with ``HorovodStrategy``, each in two real processes."""

import pytest

from tests.processes.checks import names


@pytest.mark.slow
@pytest.mark.parametrize("name", names("training"))
def test_two_ranks(run_checks, name):
    run_checks("training", 2, name, (), limit_s=300)
