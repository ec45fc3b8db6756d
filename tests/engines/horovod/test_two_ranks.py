"""Two ranks give the weights of one process."""

import pytest

from tests.kit.ranks import Job, each_check_of, names
from tests.kit.sampling import draw

pytestmark = [pytest.mark.slow, pytest.mark.alternate(turn=0)]
MODULES = [
    f"tests.engines.horovod.{name}"
    for name in ("training", "callbacks", "tapes")
]


def job(wanted):
    sets = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    return Job(MODULES[0], wanted, limit_s=240, **sets)


DRAWN, OTHERS = draw(names(*MODULES), 5)
test_ranks = each_check_of(
    {"two ranks": job(DRAWN)}, {"two ranks, not drawn": job(OTHERS)}
)
