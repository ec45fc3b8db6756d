"""Ranks on hosts of their own train one model."""

import pytest

from tests.cluster.lab import Lab, why_not
from tests.processes import started

RANKS = 2


# That several hosts find one another is what `make test-cluster` is for.
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_on_two_hosts_find_one_another():
    with Lab(RANKS) as lab:
        first = lab.hosts[0]
        folder = lab.shared / "weights"
        folder.mkdir()
        jobs = [
            host.start(
                ["python", "-m", "tests.processes.started"]
                + [str(folder), "HorovodStrategy"],
                env={
                    "TORCHELASTIC_RUN_ID": "smoke",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": first.name,
                    "MASTER_PORT": "29400",
                    "KERAS_TOWERS_MEETING_FOLDER": str(lab.shared),
                    "KERAS_TOWERS_MEETING_TIMEOUT": "60",
                },
            )
            for rank, host in enumerate(lab.hosts)
        ]
        assert [job.wait(120) for job in jobs] == [0, 0]
        started.assert_as_one_process(folder, RANKS)
