"""BytePS's scheduler and servers, beside the ranks of a job.

If one of them ends, the job ends, because its ranks would wait forever. Each is
a process that runs this module, which needs neither TensorFlow nor a GPU, with
the variables that ``dmlc`` describes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

from keras_towers.engines.byteps import byteps_recipe, dmlc
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.settings import ENV_BYTEPS_LAUNCHED
from keras_towers.jobs.launching.job import RunningJob
from keras_towers.jobs.launching.rank_process import RankProcess, RankStart
from keras_towers.jobs.rendezvous.hosts import RankPlacement
from keras_towers.jobs.rendezvous.network import is_local, reserve_port, resolve

_SERVE = [sys.executable, "-m", __name__]


class Servers:
    """The scheduler and servers of a running job, all on this machine."""

    def __init__(
        self, run: RunningJob, number: int, plan: Sequence[RankPlacement]
    ):
        # With GPUs, a worker of BytePS is a host, whose processes share memory
        # and use NCCL. Without GPUs each process is a worker.
        self._by_host = byteps_recipe.has_cuda()
        sizes = {placement.local_size for placement in plan}
        if self._by_host and len(sizes) > 1:
            raise TowerError(
                "with GPUs, BytePS needs the same number of processes on every "
                f"host, not {' and '.join(map(str, sorted(sizes)))}: give the "
                "hosts equal slots, and -np as their sum"
            )
        workers = plan[-1].cross_rank + 1 if self._by_host else len(plan)
        self._address = run.address
        self._folder = run.undo.enter_context(
            tempfile.TemporaryDirectory(
                prefix="keras-towers-byteps-", ignore_cleanup_errors=True
            )
        )
        _, _, port = reserve_port(self._address, run.undo).rpartition(":")
        self._common = {
            dmlc.NUM_WORKER: str(workers),
            dmlc.NUM_SERVER: str(number),
            dmlc.ROOT_URI: self._address,
            dmlc.ROOT_PORT: port,
            "PYTHONUNBUFFERED": "1",
        }
        variables = {
            **self._common,
            dmlc.NODE_HOST: self._address,
            # Keeps threads that have nothing to sum from spinning.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        roles = {"scheduler": "scheduler"}
        roles |= {f"server {i}": "server" for i in range(number)}
        self.processes: list[RankProcess] = [
            RankProcess(
                run,
                RankStart(
                    name, index, {**variables, dmlc.ROLE: role}, command=_SERVE
                ),
            )
            for index, (name, role) in enumerate(roles.items())
        ]

    def environment(self, placement: RankPlacement) -> dict[str, str]:
        """The variables of a rank, given its placement."""
        worker, local_rank, local_size = placement.rank, 0, 1
        sockets = f"{self._folder}/{placement.rank}"
        if self._by_host:
            worker = placement.cross_rank
            local_rank, local_size = placement.local_rank, placement.local_size
            sockets = self._folder
        local = is_local(placement.hostname)
        if local:
            os.makedirs(sockets, exist_ok=True)
        return {
            **self._common,
            ENV_BYTEPS_LAUNCHED: "1",
            dmlc.ROLE: "worker",
            dmlc.WORKER_ID: str(worker),
            dmlc.NODE_HOST: self._address
            if local
            else resolve(placement.hostname),
            dmlc.LOCAL_RANK: str(local_rank),
            dmlc.LOCAL_SIZE: str(local_size),
            **({dmlc.SOCKETS: sockets} if local else {}),
        }


def _serve() -> None:
    """Serve in this process until the job ends."""
    try:
        dmlc.check_server()
    except TowerError as error:
        sys.exit(f"keras_towers: {error}")
    # Importing the module serves, and returns when the job has ended.
    import byteps.server  # noqa: F401


if __name__ == "__main__":
    _serve()
