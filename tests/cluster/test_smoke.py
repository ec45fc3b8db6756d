"""Ranks on hosts of their own train one model."""

import pytest

from tests.cluster.jobs import met
from tests.cluster.lab import Lab, why_not
from tests.processes import started


# That several hosts find one another is what `make test-cluster` is for.
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_on_two_hosts_find_one_another():
    with Lab(2) as lab:
        trains = str(lab.shared), "HorovodStrategy"
        jobs = met(lab, *trains, script="processes.started")
        assert [job.finish(120).code for job in jobs] == [0, 0]
        started.assert_as_one_process(lab.shared)
