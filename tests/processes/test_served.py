"""Replicas over parameter servers give what one device gives."""

import pytest

from tests.kit.ranks import Job, each_check_of, names
from tests.kit.sampling import draw

pytestmark = [pytest.mark.slow, pytest.mark.alternate(turn=2)]
MODULE = "tests.processes.served"
DRAWN, OTHERS = draw(names(MODULE), 6)
# Every weight by itself, as large ones are.
CHUNKS = {"CHUNK_BYTES": "1"}
MORE = (
    "last-batch-of-one",
    "accumulation-clipped",
    "loss-scale-overflow",
    "ema-overwrite",
    "mixed-float16",
    "steps-per-execution",
    "sample-weight",
    "lazy",
    "validation",
)
THREE = (
    "last-batch-of-one",
    "embedding-clipped",
    "loss-scale-overflow",
    "workers_compute_several_gradients_of_an_update",
)
COPIES = (
    "accumulation-clipped",
    "the_chief_stops_all_after_the_same_step",
    "models_and_fits_in_turns_also_in_another_block",
    "unequal_lengths_end",
    "other_usage_is_refused",
)
SHARED = ("embedding-clipped", "loss-scale-overflow")


def job(wanted, strategy="SyncReplicasStrategy", **options):
    return Job(
        MODULE,
        wanted,
        limit_s=400,
        number="--workers",
        options=("--ps", 2),
        TESTED_STRATEGY=strategy,
        **options,
    )


# Servers take a job for failed whose last fit has.
LAST = "embedding-clipped"
JOBS = {"two workers": job((*DRAWN, LAST), **CHUNKS)}
LONG = {
    "two workers, not drawn": job((*OTHERS, LAST), **CHUNKS),
    "more cases": job(MORE),
    "three workers": job(THREE, ranks=3, **CHUNKS),
    "copies on towers": job(
        COPIES, strategy="DistributedReplicatedStrategy", **CHUNKS
    ),
    "a copy that towers share": job(
        SHARED, strategy="DistributedParameterServerStrategy", **CHUNKS
    ),
}
test_workers = each_check_of(JOBS, LONG)
