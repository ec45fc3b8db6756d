"""Two processes over BytePS train what one would, and say what they refuse."""

import pytest

from tests.engines.byteps.test_jobs import pytestmark as pytestmark
from tests.kit.ranks import Job, cases, names

# What does not depend on the engine is shown over the others.
KEPT = (
    *names("tests.engines.byteps.two_ranks"),
    *("dtypes_of_collectives", "a_large_sum_and_many_small_ones"),
)
MORE = (
    "embedding-clipped in shares",
    *("own_data_of_unequal_length", "accumulation", "steps-per-execution"),
    "other_gradients_are_refused",
    "other_data_of_an_epoch_that_follows_is_refused",
    *("weights_optimizer_shuffles_and_draws_are_those_of_rank_0", "own_loop"),
)


def job(wanted, ranks=2, servers=1):
    return Job(
        "tests.engines.byteps.two_ranks",
        ranks,
        400,
        wanted,
        options=("--servers", str(servers)),
        TESTED_STRATEGY="BytePSStrategy",
    )


JOBS = {"two ranks": job(KEPT)}
LONG = {
    "more": job(MORE),
    # Tensors are spread over the servers.
    "three ranks": job(("embedding-clipped",), ranks=3, servers=2),
}


@pytest.mark.parametrize(
    "job, name", cases(JOBS) + cases(LONG, pytest.mark.long)
)
def test_ranks(job, name):
    job.assert_passed(name)
