"""Parameter servers beside the workers of a job, on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from keras_towers.jobs.launching.job import RunningJob
from keras_towers.jobs.launching.rank_process import RankProcess, RankStart
from keras_towers.jobs.rendezvous import tf_config
from keras_towers.jobs.rendezvous.hosts import RankPlacement
from keras_towers.jobs.rendezvous.network import LOOPBACK, reserve_port
from keras_towers.jobs.rendezvous.tf_config import Cluster


class Servers:
    """The parameter servers of a running job."""

    def __init__(
        self, run: RunningJob, number: int, plan: Sequence[RankPlacement]
    ):
        ports = run.undo.enter_context(contextlib.ExitStack())
        self._jobs = {
            role: tuple(reserve_port(LOOPBACK, ports) for _ in range(count))
            for role, count in (("ps", number), ("worker", len(plan)))
        }
        # Workers need all of a GPU's memory.
        common = {**run.environment(), "CUDA_VISIBLE_DEVICES": "-1"}
        self.processes: list[RankProcess] = [
            RankProcess(
                run, RankStart(f"ps {i}", i, common | self._task("ps", i))
            )
            for i in range(number)
        ]

    def environment(self, placement: RankPlacement) -> dict[str, str]:
        """The variables of a worker, given its placement."""
        return self._task("worker", placement.rank)

    def _task(self, role: str, index: int) -> dict[str, str]:
        cluster = Cluster(self._jobs, role, index)
        # It is no rank of Horovod.
        return {tf_config.VARIABLE: cluster.to_json(), "HOROVOD_RANK": ""}
