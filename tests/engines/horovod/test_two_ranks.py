"""Two ranks give the weights of one process, also where one is killed."""

import itertools
import os
import signal

import pytest

from tests.kit.ranks import Job, cases, names
from tests.launching.jobs import Launched

pytestmark = pytest.mark.slow
# Of tests/engines/horovod/enduring.
STEPS, EVERY = 12, 5
JOB = Job(
    "tests.engines.horovod.training",
    ranks=2,
    limit_s=240,
    wanted=names(
        "tests.engines.horovod.training",
        "tests.engines.horovod.callbacks",
        "tests.engines.horovod.tapes",
    ),
    HOROVOD_DYNAMIC_PROCESS_SETS="1",
)


@pytest.mark.parametrize("job, name", cases({"two ranks": JOB}))
def test_ranks(job, name):
    job.assert_passed(name)


def test_training_goes_on_from_the_last_commit(tmp_path):
    job = Launched(
        tmp_path,
        ("--min-np", "1", "-np", "3", "-m", "tests.engines.horovod.enduring")
        + (str(tmp_path),),
    )
    # In the second epoch, behind its first commit.
    job.wait_for(tmp_path / "steps", times=STEPS + EVERY + 2)
    os.kill(int(next((tmp_path / "workers").iterdir()).name), signal.SIGKILL)
    done = job.finish()
    assert done.code == 0, done.out + done.err
    assert done.out.count("2 ranks are equal after 3 epochs") == 2
    lines = [
        [int(part) for part in line.split()]
        for line in (tmp_path / "steps").read_text().splitlines()
    ]
    # The weights are those of the place, also after going back.
    assert all(place == iterations for _, place, iterations in lines)
    places = [place for _, place, _ in lines]
    assert places[-1] == 3 * STEPS
    committed = {
        epoch * STEPS + batch
        for epoch in range(3)
        for batch in (0, EVERY, 2 * EVERY)
    }
    for before, after in itertools.pairwise(places):
        assert after == before + 1 or after - 1 in committed
    assert {size for size, *_ in lines} == {3, 2}
