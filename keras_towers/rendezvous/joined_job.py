"""The job of this process, for transports that other packages add."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.rendezvous import (
    launchers,
    meet,
    rank_checks,
    store,
    tf_config,
    watch,
)
from keras_towers.rendezvous.store import StoreClient

_PREFIX = "extension-"


@dataclasses.dataclass(frozen=True)
class JoinedJob:
    """The place of this process in its job, and a store that all ranks share.

    Attributes:
        rank: the rank of this process, from 0.
        size: the number of ranks.
        local_rank: its rank among those on its host.
        local_size: their number.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    _store: StoreClient | None = None

    def put(self, key: str, value: Any) -> None:
        """Write a value of JSON, such as this rank's address, for all ranks."""
        self._opened().put(f"{_PREFIX}{key}", value)

    def get(self, key: str, timeout_s: float) -> Any:
        """Wait for the value that a rank writes under a key.

        Raises:
            TimeoutError: none has done so in this time.
        """
        opened, name = self._opened(), f"{_PREFIX}{key}"
        return store.wait_for(lambda: opened.get(name), timeout_s)

    def _opened(self) -> StoreClient:
        if self._store is None:
            raise TowerError("a job of one process has no store to share.")
        return self._store


def join_job(engine: str) -> JoinedJob:
    """Join the job that a launcher has started this process for.

    ``keras-towers run``, Slurm, ``torchrun`` and other launchers are
    recognized. A process that none has started is a job of its own. Ranks
    compare their versions. From now on the job names ranks that are late or
    gone.

    Args:
        engine: what will connect the ranks, for messages.

    Raises:
        TowerError: the variables of a launcher contradict one another, or ranks
            have other versions.
    """
    member = launchers.detect()
    if member is None:
        tf_config.refuse_unread(engine)
        return JoinedJob()
    if member.is_single_process:
        return JoinedJob()
    meet.join_job()
    opened = store.store_of_job()
    if opened is None:
        raise TowerError(
            f"{member} has no store in which ranks could meet: start the "
            "script with `keras-towers run`."
        )
    rank, size, local_rank, local_size = (
        int(os.environ[f"HOROVOD_{name}"])
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    job = JoinedJob(rank, size, local_rank, local_size, opened)
    rank_checks.compare_with_first_rank(engine)
    watch.start_watch(job.rank, job.size)
    store.report_connected(job.rank)
    return job
