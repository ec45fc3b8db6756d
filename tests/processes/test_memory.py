"""Weights in shards over ranks save memory, measured in the process."""

import re

import pytest

from tests.kit.processes import Launched

pytestmark = pytest.mark.slow
SCRIPT = "-m", "tests.processes.memory_peak"


def peak(folder, ranks, how):
    job = Launched(
        folder,
        *("-np", ranks, *SCRIPT, how),
        # It would be as large as a third of the state.
        HOROVOD_FUSION_THRESHOLD=str(2**20),
    )
    job.finish(300)
    assert job.code == 0, job.output[-3000:]
    return float(re.search(r"peak (\d+\.\d+)", job.out)[1])


@pytest.mark.alternate(turn=1)
def test_the_peak_of_a_rank_falls_with_the_ranks(tmp_path):
    whole = peak(tmp_path, 2, "whole")
    two, four = (peak(tmp_path, ranks, "sharded") for ranks in (2, 4))
    assert whole > 1
    # Of a larger model it is nearer to a half, and a quarter: what a step needs
    # does not grow with it.
    assert two < whole - 0.2
    assert four < two - 0.1
