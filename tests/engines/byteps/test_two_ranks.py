"""Two processes over BytePS train what one would, and say what they refuse."""

import pytest

from tests.engines.byteps import test_jobs
from tests.kit.ranks import Job, each_check_of, names
from tests.kit.sampling import draw

pytestmark = [*test_jobs.pytestmark, pytest.mark.alternate(turn=1)]

CHECKS = names("tests.engines.byteps.two_ranks", "tests.processes.failures")
# BytePS sums as it was built to, and has nothing to fall back to.
NOT_ITS_OWN = "ranks_that_cannot_sum_over_nccl_sum_on_the_host"
# Behavior that does not depend on the engine is tested with the others. Threads
# of BytePS work all the time, also where they wait.
DRAWN, OTHERS = draw(
    [
        *(name for name in CHECKS if name != NOT_ITS_OWN),
        "dtypes_of_collectives",
        "a_large_sum_and_many_small_ones",
        "shapes_that_differ_between_calls_and_ranks",
        "strings_are_gathered_only",
        "rows_that_all_ranks_know_are_scattered_and_gathered",
        "a_process_has_the_memory_that_is_planned",
    ],
    6,
)
# It can only be the last of a job.
(LAST,) = names("tests.processes.ended")
MORE = (
    # Nothing has been in shards before, as in a script of a user.
    "state_is_in_shards_and_reads_as_a_whole",
    *("embedding-clipped in shares", "lazy with weights in shards"),
    *("own_data_of_unequal_length", "accumulation"),
    *("layers_with_other_settings_are_refused", "own_loop"),
)


def job(wanted, ranks=2, servers=1):
    return Job(
        "tests.engines.byteps.two_ranks",
        wanted,
        ranks,
        limit_s=400,
        options=("--servers", servers),
        TESTED_STRATEGY="BytePSStrategy",
    )


JOBS = {"two ranks": job((*DRAWN, LAST))}
LONG = {
    # One job for all would take too long on a busy machine.
    **{f"two ranks, not drawn, part {k}": job(OTHERS[k::2]) for k in range(2)},
    "more": job(MORE),
    # Tensors are spread over the servers.
    "three ranks": job(("embedding-clipped",), ranks=3, servers=2),
}
test_ranks = each_check_of(JOBS, LONG)
