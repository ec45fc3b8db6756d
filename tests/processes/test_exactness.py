"""Several processes over Horovod give what one device gives."""

import pytest

from tests.exactness.cases import CASES, OF_ONE_UPDATE
from tests.kit.long import long_but
from tests.kit.ranks import Job

HARDEST = (
    "last-batch-of-one",
    "global-clipnorm",
    "loss-scale-overflow",
    "embedding-clipped",
    "sync-batch-norm",
    "mask",
    "steps-per-execution",
    "contrastive",
    "clipped-by-hand",
)
ON_THREE_RANKS = (
    "last-batch-of-one",
    "loss-scale-overflow",
    "embedding-clipped",
    "sync-batch-norm",
    "contrastive",
)
# Another of the cases below has all of what these have.
COVERED = (
    *OF_ONE_UPDATE,
    *ON_THREE_RANKS,
    "accumulation",
    "embedding",
    "validation-split",
)
IN_SHARES = "embedding-clipped in shares of two towers"
ON_TWO_RANKS = (
    *(name for name in CASES if name not in COVERED),
    *(f"{name} on two towers" for name in HARDEST),
    "batch-norm of the global batch",
)
# Every fifth one; the rest is in `make test-all`.
KEPT = (*ON_TWO_RANKS[::5], IN_SHARES)
REST = tuple(name for name in ON_TWO_RANKS if name not in KEPT)
TWO_RANKS = {
    True: Job("tests.processes.exact", 2, 500, KEPT),
    False: Job("tests.processes.exact", 2, 500, REST),
}
THREE_RANKS = Job("tests.processes.exact", 3, 240, ON_THREE_RANKS)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name", long_but(KEPT.__contains__, (*ON_TWO_RANKS, IN_SHARES))
)
def test_two_ranks(name):
    TWO_RANKS[name in KEPT].assert_passed(name)


@pytest.mark.long
@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_three_ranks(name):
    THREE_RANKS.assert_passed(name)
