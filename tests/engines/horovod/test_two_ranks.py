"""Two ranks give the weights of one process."""

import pytest

from tests.kit.ranks import Job, cases, names

pytestmark = pytest.mark.slow
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
