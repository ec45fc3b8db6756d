"""Two ranks give the weights of one process."""

import pytest

from tests.kit.ranks import Job, each_check_of, names

pytestmark = pytest.mark.slow
MODULES = [
    f"tests.engines.horovod.{name}"
    for name in ("training", "callbacks", "tapes")
]
JOB = Job(
    MODULES[0], names(*MODULES), limit_s=240, HOROVOD_DYNAMIC_PROCESS_SETS="1"
)
test_ranks = each_check_of({"two ranks": JOB})
