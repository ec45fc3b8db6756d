"""``kt.extending.join_job``: the job of this process, for other transports."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import urllib.parse
from typing import Any

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous import (
    launchers,
    meet,
    rank_checks,
    separate_training,
    store,
    watch,
)


@dataclasses.dataclass(frozen=True)
class JoinedJob:
    """The place of this process in its job, and a store that all ranks share.

    Attributes:
        rank: the rank of this process, from 0.
        size: the number of ranks.
        local_rank: its rank among the ranks on its host.
        local_size: the number of ranks on its host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    _store: Any = dataclasses.field(default=None, repr=False)
    _prefix: str = dataclasses.field(default="", repr=False)

    def put(self, key: str, value: object) -> None:
        """Write a value of JSON, such as this rank's address, for all ranks.

        Only the same call of ``join_job`` on other ranks sees it.
        """
        self._opened().put(self._name_of(key), value)

    def get(self, key: str, timeout_s: float) -> Any:
        """Wait for the value that a rank writes under a key.

        Raises:
            TimeoutError: no rank has written it in this time.
        """
        try:
            text = self._opened().wait(self._name_of(key), timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"no rank wrote {key!r} in {timeout_s} s"
            ) from None
        return json.loads(text)

    def _opened(self) -> Any:
        if self._store is None:
            raise TowerError(
                "a job of one process cannot put or get values: call these "
                "only if size is more than 1."
            )
        return self._store

    def _name_of(self, key: str) -> str:
        return urllib.parse.quote(f"{self._prefix}-{key}", safe="")


# How often each engine has joined its job: all ranks make their strategies in
# one order, and what one of them writes is not for the next.
_joined: collections.Counter[str] = collections.Counter()


def join_job(engine: str) -> JoinedJob:
    """Join the job to which this process belongs.

    This recognizes ``keras-towers run``, Slurm, ``torchrun`` and other
    launchers. If no launcher has started this process, it is a job of one rank.
    Ranks compare their versions. After this call, errors name ranks that are
    late or gone.

    Args:
        engine: the name of the engine that will connect the ranks.

    Raises:
        TowerError: the variables of a launcher contradict one another, or the
            versions of ranks differ.
    """
    separate_training.refuse_child()
    member, opened = launchers.detect(), None
    if member is not None and not member.is_single_process:
        meet.join_job()
        opened = store.store_of_job()
    if opened is None:
        separate_training.refuse(
            engine,
            "there is no store in which ranks could meet",
            "Start the script with `keras-towers run`.",
        )
        return JoinedJob()
    rank, size, local_rank, local_size = (
        int(os.environ[f"HOROVOD_{name}"])
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    _joined[engine] += 1
    prefix = f"extension-{engine}-{_joined[engine]}"
    job = JoinedJob(rank, size, local_rank, local_size, opened, prefix)
    rank_checks.compare_with_first_rank(engine)
    separate_training.take_place(job)
    watch.start_watch(job.rank, job.size)
    store.report_connected(job.rank)
    return job
