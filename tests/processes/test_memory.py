"""Weights in shards over ranks save memory, measured in the process."""

import re

import pytest

from tests.kit.processes import Launched

pytestmark = pytest.mark.slow
SCRIPT = "-m", "tests.processes.memory_peak"
ENVIRONMENT = {
    # It would be as large as a third of the state.
    "HOROVOD_FUSION_THRESHOLD": str(2**20),
    # A process then gives back what it frees, which a limit counts.
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
}


def train(folder, ranks, how, backup="", limit=0.0):
    """Run a job; return what it says: numbers, by their names."""
    job = Launched(
        folder, *("-np", ranks, *SCRIPT, how, backup, limit), **ENVIRONMENT
    )
    job.finish(400)
    assert bool(limit) is bool(job.code), job.output[-3000:]
    said = re.findall(r"(made|peak|sums|batches) ([\d. e+-]+)", job.out)
    return {name: [*map(float, numbers.split())] for name, numbers in said}


@pytest.mark.alternate(turn=1)
def test_ranks_train_and_resume_what_none_of_them_may_hold(tmp_path):
    backup = tmp_path / "backup"
    whole = train(tmp_path, 2, "whole")
    # Four ranks, none of which may hold the state, save it and are killed.
    four = train(tmp_path, 4, "sharded", backup, limit=0.9)
    two = train(tmp_path, 2, "sharded", backup)
    assert (whole["batches"], two["batches"]) == ([4], [3])
    assert two["sums"] == pytest.approx(whole["sums"], rel=1e-5)
    # Each rank makes its rows only, of one whole at a time.
    assert four["made"][0] < 0.1 < whole["made"][0]
    # Of a larger model it is nearer to a half, and a quarter: what a step needs
    # does not grow with it.
    peaks = [found["peak"][0] for found in (whole, two, four)]
    assert peaks[0] > 1
    assert peaks[1] < peaks[0] - 0.2
    assert peaks[2] < peaks[1] - 0.1
