"""Processes that a rank starts, such as those that read data."""

import pytest

from tests.kit.processes import Launched
from tests.kit.sampling import sample_of

pytestmark = pytest.mark.slow


@pytest.mark.alternate(turn=4)
@pytest.mark.parametrize(
    ("kind", "options"),
    sample_of(
        [
            ("HorovodStrategy", ("-np",)),
            ("BytePSStrategy", ("--servers", 1, "-np")),
            ("MultiWorkerTowerStrategy", ("--workers",)),
        ],
        3,
    ),
)
def test_a_process_that_a_rank_has_started_is_no_rank(tmp_path, kind, options):
    *more, number = options
    script = "-m", "tests.processes.spawned", kind
    done = Launched(tmp_path, number, 2, *more, *script).finish()
    assert done.code == 0, done.err
    assert done.out.count("trained to the end") == 2
    assert "would train its own model" not in done.err
